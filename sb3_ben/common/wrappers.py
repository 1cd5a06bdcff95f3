"""Gymnasium wrappers that give other algorithms the inputs that BEN has."""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_ben.common.buffers import map_observations
from sb3_ben.common.priors import BeliefTracker, Believed, Prior, PriorFactory

__all__ = ["BeliefObservation", "PreviousActionReward"]


class PreviousActionReward(gym.Wrapper[np.ndarray, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Appends the previous action and the previous reward to every observation.

    The observation becomes one vector: the original one, flattened, the previous action and the previous reward, with whatever is
    ``Discrete`` as one-hot. After a reset there is no previous action and no reward, and both are zero. In the hyperparameters of
    rl-zoo3::

        env_wrapper:
          - sb3_ben.common.wrappers.PreviousActionReward:
              reward_scale: 0.1

    :param env: the environment to wrap; images are flattened too, which no convolution will like
    :param reward_scale: factor on the reward in the observation; the reward that the agent receives is left alone
    """

    def __init__(self, env: gym.Env, reward_scale: float = 1.0) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, reward_scale=reward_scale)
        gym.Wrapper.__init__(self, env)
        if not np.isfinite(reward_scale) or reward_scale <= 0:
            raise ValueError(f"`reward_scale` must be positive and finite, got {reward_scale}")
        self.reward_scale = float(reward_scale)
        inner, action = _flat_box(env.observation_space, "observation"), _flat_box(env.action_space, "action")
        # zero stands for no action, whether or not it is one
        low = np.concatenate((inner.low, np.minimum(action.low, 0), [-np.inf]))
        high = np.concatenate((inner.high, np.maximum(action.high, 0), [np.inf]))
        self.observation_space = spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)
        self._no_action = np.zeros(action.shape, dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._extended(observation, self._no_action, 0.0), info

    def step(self, action: Any) -> tuple[np.ndarray, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        flat_action = spaces.flatten(self.env.action_space, action)
        return self._extended(observation, flat_action, float(reward)), reward, terminated, truncated, info

    def _extended(self, observation: Any, flat_action: Any, reward: float) -> np.ndarray:
        flat: Any = spaces.flatten(self.env.observation_space, observation)
        return np.concatenate((flat, flat_action, [self.reward_scale * reward]), dtype=np.float32)


class BeliefObservation(gym.Wrapper[np.ndarray, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Appends what a filter says to every observation: other algorithms can then act on the same belief as BEN.

    The filter reads the environment's own observations, so this wrapper comes before others. In the hyperparameters of rl-zoo3::

        env_wrapper:
          - sb3_ben.common.wrappers.BeliefObservation:
              prior: sb3_ben.oracles.rescue_prior.exact_filter
          - sb3_ben.common.wrappers.PreviousActionReward

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
        inner = _flat_box(env.observation_space, "observation")
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


def _flat_box(space: spaces.Space, name: str) -> spaces.Box:
    """The vectors that a space is flattened to."""
    flat = spaces.flatten_space(space)
    if not isinstance(flat, spaces.Box):
        raise ValueError(f"The {name} space {space} cannot be flattened to vectors of one length")
    return flat
