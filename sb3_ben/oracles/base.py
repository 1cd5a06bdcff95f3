"""What all oracles share: SB3's ``predict``, with the belief in its recurrent state."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import numpy as np

from sb3_ben.envs.world import WorldConfig
from sb3_ben.history.previous_reward import previous_reward

__all__ = ["Oracle", "OracleState"]

#: arrays with one row per environment; an oracle keeps in them whatever it has to remember of an episode
OracleState = tuple[np.ndarray, ...]
ConfigT = TypeVar("ConfigT", bound=WorldConfig)


class Oracle(ABC, Generic[ConfigT]):
    """An agent that knows the problem, called like an SB3 model.

    Nothing of an episode is kept in the oracle: the history it needs travels in ``state``, as with a recurrent policy. Rewards
    are read off the observation (see :class:`~sb3_ben.history.previous_reward.VecPreviousReward`);
    ``sb3_ben.evaluate_policy`` provides them.

    :param config: the arguments of the environment
    :param seed: seed of the oracle's own draws, for those that draw
    """

    #: whether the oracle learns something from rewards that the observation does not tell
    needs_reward = False
    #: shape of one observation
    observation_shape: tuple[int, ...] = ()
    #: which entry of the state is the last action, if it is remembered
    action_entry: int | None = None

    def __init__(self, config: ConfigT, seed: int | None = None) -> None:
        self.config = config
        self.rng = np.random.default_rng(seed)
        self._warned = False

    def predict(
        self,
        observation: Any,
        state: OracleState | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, OracleState]:
        """Choose actions, as ``BaseAlgorithm.predict`` does.

        :param observation: one observation, or a batch of them
        :param state: what the last call returned, ``None`` for a fresh memory
        :param episode_start: which environments have begun a new episode
        :param deterministic: as in SB3; an oracle that draws one hypothesis per episode draws it all the same
        :return: the actions and the state to pass to the next call
        """
        batch = np.asarray(observation)
        single = batch.shape == self.observation_shape
        batch = batch[None] if single else batch
        if batch.shape[1:] != self.observation_shape:
            raise ValueError(f"expected observations of shape {self.observation_shape} or a batch of them, got {batch.shape}")
        n_envs = len(batch)
        state = self._fresh(state, n_envs, episode_start)
        actions, state = self._act(batch, self._rewards(observation, n_envs), state, deterministic)
        return (actions[0] if single else actions), state

    def with_actions(self, state: OracleState, actions: np.ndarray) -> OracleState:
        """The state after executing other actions than the chosen ones.

        :param state: what the last call of ``predict`` returned
        :param actions: what was executed, one action per environment
        """
        if self.action_entry is None:
            return state
        return (*state[: self.action_entry], np.asarray(actions, dtype=np.int64), *state[self.action_entry + 1 :])

    def _fresh(self, state: OracleState | None, n_envs: int, episode_start: np.ndarray | None) -> OracleState:
        """The state with the rows of new episodes replaced by initial ones."""
        if state is not None and any(len(part) != n_envs for part in state):
            raise ValueError(f"`state` remembers {len(state[0])} environments, but {n_envs} observations were given")
        initial = self._initial_state(n_envs)
        if state is None or episode_start is None:
            return initial if state is None else tuple(part.copy() for part in state)
        starts = np.asarray(episode_start, dtype=bool).reshape(n_envs)
        rows = [starts.reshape(-1, *[1] * (part.ndim - 1)) for part in state]
        return tuple(np.where(row, new, old) for row, new, old in zip(rows, initial, state, strict=True))

    def _rewards(self, observation: Any, n_envs: int) -> np.ndarray:
        """The previous rewards, NaN where the observation does not carry them."""
        rewards = previous_reward(observation)
        if rewards is None and self.needs_reward and not self._warned:
            self._warned = True
            name = type(self).__name__
            warnings.warn(
                f"{name} learns from rewards, and these observations carry none: it acts on what it hears alone. Use "
                "sb3_ben.evaluate_policy or wrap the environment in VecPreviousReward.",
                stacklevel=3,
            )
        return np.full(n_envs, np.nan) if rewards is None else np.asarray(rewards, dtype=float).reshape(n_envs)

    def _initial_state(self, n_envs: int) -> OracleState:
        """The state of ``n_envs`` episodes that have just begun."""
        return ()

    @abstractmethod
    def _act(
        self, observations: np.ndarray, rewards: np.ndarray, state: OracleState, deterministic: bool
    ) -> tuple[np.ndarray, OracleState]:
        """Actions and next state for a batch. The first observation of an episode comes with an initial state, in which the
        previous action is marked as none, so that the reward beside it is ignored."""
