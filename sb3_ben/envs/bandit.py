"""A Bernoulli bandit with a uniform prior over its arms: the smallest problem with exact Bayes-optimal answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from sb3_ben.envs.views import WorldEnv, WorldVecEnv, WorldVectorEnv
from sb3_ben.envs.world import World, WorldConfig, require

__all__ = ["BanditConfig", "BernoulliBandit", "BernoulliBanditEnv", "BernoulliBanditVecEnv", "BernoulliBanditVectorEnv"]


@dataclass(frozen=True)
class BanditConfig(WorldConfig):
    """Arguments of ``BernoulliBandit-v0``.

    :param n_arms: number of arms
    :param horizon: number of pulls; the episode terminates after the last
    """

    n_arms: int = 2
    horizon: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.n_arms >= 2, "n_arms", f"must be at least 2, got {self.n_arms}")
        require(self.horizon >= 1, "horizon", f"must be at least 1, got {self.horizon}")


class BernoulliBandit(World[BanditConfig]):
    """``n_arms`` arms pay 1 or 0 with probabilities drawn uniformly at the start of each episode.

    The observation is the last reward bit (0 before the first pull): who wants to know which arm paid has to remember it. The
    context is the tuple of the arms' probabilities.
    """

    config_class = BanditConfig
    terminates = True  # a finite game of known length, not a time limit: nothing lies beyond the last pull

    def __init__(self, n_envs: int, config: BanditConfig) -> None:
        super().__init__(n_envs, config)
        self.horizon = config.horizon
        self.observation_space = spaces.Discrete(2)
        self.action_space = spaces.Discrete(config.n_arms)
        self.probabilities = np.zeros((n_envs, config.n_arms))
        self.bit = np.zeros(n_envs, dtype=np.int64)
        self.stats = {name: np.zeros(n_envs, dtype=np.int64) for name in ("wins", "best_pulls")}

    def observe(self) -> np.ndarray:
        return self.bit.copy()

    def _draw_context(self, rng: np.random.Generator) -> tuple[float, ...]:
        return tuple(rng.random(self.config.n_arms).tolist())

    def _check_context(self, context: Any) -> tuple[float, ...]:
        probabilities = np.asarray(context, dtype=float)
        fits = probabilities.shape == (self.config.n_arms,) and bool(np.all((probabilities >= 0) & (probabilities <= 1)))
        require(fits, "context", f"of the bandit is one probability per arm, got {context!r}")
        return tuple(probabilities.tolist())

    def _begin(self, indices: np.ndarray) -> None:
        for i in indices:
            self.probabilities[i] = self.contexts[i]
        self.bit[indices] = 0

    def _draw_noise(self, rng: np.random.Generator, n_steps: int) -> np.ndarray:
        return rng.random(n_steps)

    def _advance(self, actions: np.ndarray, noise: np.ndarray) -> np.ndarray:
        chances = self.probabilities[np.arange(self.n_envs), actions]
        self.bit = (noise < chances).astype(np.int64)
        self.stats["wins"] += self.bit
        self.stats["best_pulls"] += chances == self.probabilities.max(axis=1)
        return self.bit.astype(float)


class BernoulliBanditEnv(WorldEnv):
    """``BernoulliBandit-v0``; takes the arguments of :class:`BanditConfig`."""

    world_class = BernoulliBandit


class BernoulliBanditVecEnv(WorldVecEnv):
    """Many bandits as one SB3 ``VecEnv``; takes the arguments of :class:`BanditConfig`."""

    world_class = BernoulliBandit


class BernoulliBanditVectorEnv(WorldVectorEnv):
    """Many bandits as one gymnasium ``VectorEnv``; takes the arguments of :class:`BanditConfig`."""

    world_class = BernoulliBandit
