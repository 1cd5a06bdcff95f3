"""The previous reward, carried on the observation.

A history-dependent agent needs (s_t, a_{t-1}, r_{t-1}), but SB3 hands ``predict`` an observation only. :class:`VecPreviousReward`
leaves every space untouched and returns observations that carry the reward received on the way to them as an attribute.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecNormalize, unwrap_vec_normalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

__all__ = [
    "DictWithReward",
    "ObservationWithReward",
    "VecPreviousReward",
    "attach_reward",
    "carry_in_evaluation",
    "previous_reward",
]


NORMALIZE_SETTINGS = ("training", "norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon")


class ObservationWithReward(np.ndarray):
    """An observation batch that remembers the rewards received on the way to it.

    Only the array made by :func:`attach_reward` carries them, and what a pickle makes of it: a view, slice or copy of it is a
    plain observation again, since rewards attached to other rows would be worse than none.
    """

    reward: np.ndarray | None = None

    def __reduce__(self) -> Any:
        plain = self.view(np.ndarray)
        return plain.__reduce__() if self.reward is None else (attach_reward, (plain, self.reward))


class DictWithReward(dict):
    """A dictionary of observation batches that remembers the rewards received on the way to it; a copy of it does not."""

    reward: np.ndarray | None = None


def attach_reward(observation: VecEnvObs, reward: np.ndarray) -> VecEnvObs:
    """Return the observation batch with the rewards received on the way to it."""
    if isinstance(observation, dict):
        tagged_dict = DictWithReward(observation)
        tagged_dict.reward = reward
        return tagged_dict
    tagged = np.asarray(observation).view(ObservationWithReward)
    tagged.reward = reward
    return tagged


def previous_reward(observation: Any) -> np.ndarray | None:
    """The rewards attached to an observation batch, or ``None`` where there are none."""
    return getattr(observation, "reward", None) if isinstance(observation, (ObservationWithReward, DictWithReward)) else None


class VecPreviousReward(VecEnvWrapper):
    """Attaches to every observation the reward received on the way to it (0 after a reset).

    It belongs outermost: wrappers around it that copy observations lose the reward. Inside it, ``VecNormalize`` may normalise
    rewards for the learner; what is attached is the original reward, the same in training and in evaluation. Its settings can be
    changed from here as if it were outermost (``model.get_env().training = False``).

    :param venv: the environment to wrap
    """

    def __init__(self, venv: VecEnv) -> None:
        super().__init__(venv)
        self._normalize: VecNormalize | None = unwrap_vec_normalize(venv)

    def __setattr__(self, name: str, value: Any) -> None:
        is_setting = name in NORMALIZE_SETTINGS and self.__dict__.get("_normalize") is not None
        object.__setattr__(self._normalize if is_setting else self, name, value)

    def reset(self) -> VecEnvObs:
        return attach_reward(self.venv.reset(), np.zeros(self.num_envs, dtype=np.float32))

    def step_wait(self) -> VecEnvStepReturn:
        observations, rewards, dones, infos = self.venv.step_wait()
        original = rewards if self._normalize is None else self._normalize.get_original_reward()
        return attach_reward(observations, np.asarray(original, dtype=np.float32)), rewards, dones, infos


def carry_in_evaluation(callback: Any, seen: set[int] | None = None) -> None:
    """Wrap the environments of all evaluation callbacks, nested ones too, so that evaluation is exact."""
    seen = set() if seen is None else seen  # callbacks may know each other
    if not isinstance(callback, (list, BaseCallback)) or id(callback) in seen:
        return
    seen.add(id(callback))
    if isinstance(callback, EvalCallback) and not isinstance(callback.eval_env, VecPreviousReward):
        callback.eval_env = VecPreviousReward(callback.eval_env)
    for child in callback if isinstance(callback, list) else vars(callback).values():
        carry_in_evaluation(child, seen)
