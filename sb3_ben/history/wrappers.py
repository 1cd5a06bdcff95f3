"""A gymnasium wrapper that gives other algorithms the history that BEN has."""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium import spaces

__all__ = ["PreviousActionReward", "flat_box"]


class PreviousActionReward(gym.Wrapper[np.ndarray, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Appends the previous action and the previous reward to every observation.

    The observation becomes one vector: the original one, flattened, the previous action and the previous reward, with whatever is
    ``Discrete`` as one-hot. After a reset there is no previous action and no reward, and both are zero. In the hyperparameters of
    rl-zoo3::

        env_wrapper:
          - sb3_ben.history.wrappers.PreviousActionReward:
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
        inner, action = flat_box(env.observation_space, "observation"), flat_box(env.action_space, "action")
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


def flat_box(space: spaces.Space, name: str) -> spaces.Box:
    """The vectors that a space is flattened to."""
    flat = spaces.flatten_space(space)
    if not isinstance(flat, spaces.Box):
        raise ValueError(f"The {name} space {space} cannot be flattened to vectors of one length")
    return flat
