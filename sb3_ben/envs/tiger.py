"""The contextual tiger problem of Fellows et al. (2024), appendix E.1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from sb3_ben.envs.views import WorldEnv, WorldVecEnv, WorldVectorEnv
from sb3_ben.envs.world import World, WorldConfig, require

__all__ = ["Tiger", "TigerConfig", "TigerEnv", "TigerVecEnv", "TigerVectorEnv"]

OPEN_1, OPEN_2, LISTEN = range(3)


@dataclass(frozen=True)
class TigerConfig(WorldConfig):
    """Arguments of ``Tiger-v0``.

    :param p_correct: probability that listening moves to the state of the tiger's door (s1 or s2)
    :param p_wrong: probability that it moves to the state of the other door; otherwise it returns to s0
    :param reward_tiger: reward for opening the tiger's door
    :param reward_gold: reward for opening the other door
    :param reward_listen: reward for listening
    :param horizon: number of steps before the time limit truncates the episode
    """

    p_correct: float = 0.85
    p_wrong: float = 0.10
    reward_tiger: float = -500.0
    reward_gold: float = 10.0
    reward_listen: float = -1.0
    horizon: int = 11

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.p_correct <= 1, "p_correct", f"must be a probability, got {self.p_correct}")
        room = 1 - self.p_correct + 1e-12  # 0.85 + 0.15 may round above one
        require(0 <= self.p_wrong <= room, "p_wrong", f"must be a probability of at most 1 - p_correct, got {self.p_wrong}")
        require(self.horizon >= 1, "horizon", f"must be at least 1, got {self.horizon}")


class Tiger(World[TigerConfig]):
    """A tiger waits behind one of two doors for the whole episode, gold behind the other.

    States (observed) s0, s1, s2; actions open 1, open 2, listen. Opening pays at once and returns to s0. The context is the
    tiger's door, 0 or 1.
    """

    config_class = TigerConfig

    def __init__(self, n_envs: int, config: TigerConfig) -> None:
        super().__init__(n_envs, config)
        self.horizon = config.horizon
        self.observation_space = spaces.Discrete(3)
        self.action_space = spaces.Discrete(3)
        self.tiger = np.zeros(n_envs, dtype=np.int64)
        self.state = np.zeros(n_envs, dtype=np.int64)
        self.stats = {name: np.zeros(n_envs, dtype=np.int64) for name in ("golds", "tigers", "listens")}

    def observe(self) -> np.ndarray:
        return self.state.copy()

    def _draw_context(self, rng: np.random.Generator) -> int:
        return int(rng.integers(2))

    def _check_context(self, context: Any) -> int:
        require(context in (0, 1), "context", f"of the tiger problem is its door, 0 or 1, got {context!r}")
        return int(context)

    def _begin(self, indices: np.ndarray) -> None:
        self.tiger[indices] = [self.contexts[i] for i in indices]
        self.state[indices] = 0

    def _draw_noise(self, rng: np.random.Generator, n_steps: int) -> np.ndarray:
        return rng.random(n_steps)

    def _advance(self, actions: np.ndarray, noise: np.ndarray) -> np.ndarray:
        config = self.config
        listens = actions == LISTEN
        tigers = actions == self.tiger
        golds = ~listens & ~tigers
        right = noise < config.p_correct
        heard = right | (noise < config.p_correct + config.p_wrong)
        side = np.where(right, self.tiger, 1 - self.tiger)
        self.state = np.where(listens & heard, 1 + side, 0)
        for name, events in (("golds", golds), ("tigers", tigers), ("listens", listens)):
            self.stats[name] += events
        return np.select([listens, tigers], [config.reward_listen, config.reward_tiger], config.reward_gold)


class TigerEnv(WorldEnv):
    """``Tiger-v0``; takes the arguments of :class:`TigerConfig`."""

    world_class = Tiger


class TigerVecEnv(WorldVecEnv):
    """Many tiger problems as one SB3 ``VecEnv``; takes the arguments of :class:`TigerConfig`."""

    world_class = Tiger


class TigerVectorEnv(WorldVectorEnv):
    """Many tiger problems as one gymnasium ``VectorEnv``; takes the arguments of :class:`TigerConfig`."""

    world_class = Tiger
