"""Batched worlds: the dynamics of an environment, written once for any number of parallel episodes.

A :class:`World` advances ``n_envs`` episodes with numpy array operations. The single environment (``gymnasium.Env``), the SB3
``VecEnv`` and gymnasium's ``VectorEnv`` of :mod:`sb3_ben.envs.views` are thin views on a world of one or of many episodes, so a
single environment and a vectorised one cannot drift apart.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded

__all__ = ["World", "WorldConfig", "require"]

NOISE_BLOCK = 256  # steps of randomness drawn at once: long horizons stay cheap in memory


def require(condition: bool, argument: str, message: str) -> None:
    """Raise a ``ValueError`` that names the offending argument unless ``condition`` holds."""
    if not condition:
        raise ValueError(f"`{argument}` {message}")


@dataclasses.dataclass(frozen=True)
class WorldConfig:
    """The keyword arguments of an environment, in one place for the environments, their vectorised forms and the oracles."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            wanted = {"int": (int, np.integer), "float": (int, float, np.integer, np.floating)}[str(field.type)]
            is_number = isinstance(value, wanted) and not isinstance(value, bool)
            require(is_number and bool(np.isfinite(value)), field.name, f"must be a finite {field.type}, got {value!r}")

    @classmethod
    def from_kwargs(cls: type[ConfigT], **kwargs: Any) -> ConfigT:
        """Build the configuration from an environment's keyword arguments; unknown names are a ``ValueError``."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in kwargs:
            require(name in known, name, f"is not an argument of {cls.__name__}; known are {', '.join(known)}")
        return cls(**kwargs)


ConfigT = TypeVar("ConfigT", bound=WorldConfig)


class World(ABC, Generic[ConfigT]):
    """``n_envs`` independent episodes of one environment.

    Every slot has its own random generator: the episodes of slot ``i`` do not depend on how many others run beside it, and the
    randomness of step ``t`` does not depend on the actions taken before (agents compared on one seed meet the same noise).

    :param n_envs: number of parallel episodes
    :param config: the environment's arguments
    """

    config_class: ClassVar[type[WorldConfig]]
    observation_space: spaces.Space
    action_space: spaces.Discrete
    horizon: int
    #: whether the end of the horizon is a terminal state (a finite problem) or a time limit (truncation)
    terminates: ClassVar[bool] = False

    def __init__(self, n_envs: int, config: ConfigT) -> None:
        is_count = isinstance(n_envs, (int, np.integer)) and n_envs >= 1
        require(is_count, "n_envs", f"must be an integer of at least 1, got {n_envs!r}")
        self.n_envs = n_envs
        self.config = config
        self.rngs: list[np.random.Generator] = [np.random.default_rng() for _ in range(n_envs)]
        self.elapsed = np.zeros(n_envs, dtype=np.int64)
        self.running = np.zeros(n_envs, dtype=bool)
        self.contexts: list[Any] = [None] * n_envs
        self.stats: dict[str, np.ndarray] = {}
        self._noise: np.ndarray = np.zeros((n_envs, 0))

    def reset(self, indices: Sequence[int] | np.ndarray, contexts: Mapping[int, Any] | None = None) -> None:
        """Start new episodes in the slots ``indices``, in freshly drawn contexts or in the ones given by slot."""
        indices = np.asarray(indices, dtype=np.int64)
        self.elapsed[indices] = 0
        self.running[indices] = True
        for values in self.stats.values():
            values[indices] = 0
        for i in indices:
            given = None if contexts is None else contexts.get(int(i))
            self.contexts[i] = self._draw_context(self.rngs[i]) if given is None else self._check_context(given)
        self._begin(indices)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Advance all episodes; return rewards (float64) and whether each episode has reached its horizon."""
        if not self.running.all():
            raise ResetNeeded("call reset() before step(), also after the end of an episode")
        actions = np.asarray(actions)
        if actions.shape != (self.n_envs,) or not np.issubdtype(actions.dtype, np.integer):
            raise ValueError(f"`actions` must be {self.n_envs} integers, got {actions.dtype} of shape {actions.shape}")
        if actions.min() < 0 or actions.max() >= self.action_space.n:
            raise ValueError(f"`actions` must lie in [0, {self.action_space.n - 1}], got {actions}")
        block = self.elapsed % NOISE_BLOCK
        for i in np.flatnonzero(block == 0):
            self._refill_noise(int(i))
        rewards = self._advance(actions, self._noise[np.arange(self.n_envs), block])
        self.elapsed += 1
        self.running = self.elapsed < self.horizon
        return rewards, ~self.running

    def infos(self) -> list[dict[str, Any]]:
        """What each slot reports beside the observation: running counts, and the context (for oracles and plots, not for agents).

        Contexts are immutable, so that all the infos of an episode can share one.
        """
        names = (*self.stats, "context")
        counts = (values.tolist() for values in self.stats.values())
        return [dict(zip(names, row, strict=True)) for row in zip(*counts, self.contexts, strict=True)]

    @abstractmethod
    def observe(self) -> np.ndarray:
        """The current observations of all episodes, a fresh array of shape ``(n_envs, *observation_space.shape)``."""

    @abstractmethod
    def _draw_context(self, rng: np.random.Generator) -> Any:
        """Draw the unknown of one episode (which MDP it is) from the prior, as an immutable object."""

    @abstractmethod
    def _check_context(self, context: Any) -> Any:
        """Validate a context given by the caller and return it in the form that :meth:`_draw_context` returns."""

    @abstractmethod
    def _begin(self, indices: np.ndarray) -> None:
        """Put the slots ``indices`` into the initial state of their contexts."""

    def _refill_noise(self, i: int) -> None:
        block = self._draw_noise(self.rngs[i], min(NOISE_BLOCK, self.horizon))
        if self._noise.shape[1:] != block.shape:
            self._noise = np.zeros((self.n_envs, *block.shape))
        self._noise[i] = block

    @abstractmethod
    def _draw_noise(self, rng: np.random.Generator, n_steps: int) -> np.ndarray:
        """Draw the randomness of the next ``n_steps`` steps of one slot, with the steps on the first axis."""

    @abstractmethod
    def _advance(self, actions: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Apply the actions, with this step's noise of each slot; return the rewards."""
