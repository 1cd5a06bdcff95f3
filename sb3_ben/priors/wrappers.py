"""A gymnasium wrapper that gives other algorithms the belief that BEN has."""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_ben.history.samples import map_observations
from sb3_ben.history.wrappers import flat_box
from sb3_ben.priors.filters import BeliefTracker, Believed
from sb3_ben.priors.prior import Prior, PriorFactory

__all__ = ["BeliefObservation"]


class BeliefObservation(gym.Wrapper[np.ndarray, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Appends what a filter says to every observation: other algorithms can then act on the same belief as BEN.

    The filter reads the environment's own observations, so this wrapper comes before others. In the hyperparameters of rl-zoo3::

        env_wrapper:
          - sb3_ben.priors.BeliefObservation:
              prior: sb3_ben.oracles.rescue_prior.exact_filter
          - sb3_ben.history.wrappers.PreviousActionReward

    :param env: the environment to wrap, with discrete actions
    :param prior: a prior with a belief, or a function that makes one for the environment, or its dotted name, as for BEN
    """

    def __init__(self, env: gym.Env, prior: Prior | PriorFactory | str) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, prior=prior)
        gym.Wrapper.__init__(self, env)
        if not isinstance(env.action_space, spaces.Discrete):
            raise ValueError(f"Beliefs are for discrete actions, got {env.action_space}")
        belief = Prior.of(prior, DummyVecEnv([lambda: env])).belief
        if belief is None:
            raise ValueError("`prior` has no belief that could be observed")
        self.tracker = BeliefTracker([belief])
        self._believed: Believed | None = None
        inner = flat_box(env.observation_space, "observation")
        unbounded = np.full(self.tracker.dim, np.inf)
        low, high = np.concatenate((inner.low, -unbounded)), np.concatenate((inner.high, unbounded))
        self.observation_space = spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._believed = self.tracker.begin(map_observations(_as_batch, observation))
        return self._extended(observation), info

    def step(self, action: Any) -> tuple[np.ndarray, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        assert self._believed is not None, "reset() comes first"
        actions, rewards = np.array([int(action) - int(self.env.action_space.start)]), np.array([float(reward)])  # type: ignore[attr-defined]
        batch = map_observations(_as_batch, observation)
        self._believed = self.tracker.advance(self._believed.state, batch, actions, rewards)
        return self._extended(observation), reward, terminated, truncated, info

    def _extended(self, observation: Any) -> np.ndarray:
        assert self._believed is not None
        flat: Any = spaces.flatten(self.env.observation_space, observation)
        return np.concatenate((flat, self._believed.features[0]), dtype=np.float32)


def _as_batch(observation: Any) -> np.ndarray:
    return np.asarray(observation)[None]
