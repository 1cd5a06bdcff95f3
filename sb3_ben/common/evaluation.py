"""Evaluation that gives history-dependent agents the rewards they need."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from stable_baselines3.common import evaluation
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from sb3_ben.history.previous_reward import VecPreviousReward

__all__ = ["evaluate_policy"]


def evaluate_policy(model: Any, env: gym.Env | VecEnv, *args: Any, **kwargs: Any) -> Any:
    """SB3's :func:`~stable_baselines3.common.evaluation.evaluate_policy`, exact for agents that read the previous reward.

    It takes the same arguments and returns the same values; the only difference is that the environment is wrapped in a
    :class:`~sb3_ben.history.previous_reward.VecPreviousReward` unless it already is, outermost.
    """
    venv = env if isinstance(env, VecEnv) else DummyVecEnv([lambda: env])
    if not isinstance(venv, VecPreviousReward):
        venv = VecPreviousReward(venv)
    return evaluation.evaluate_policy(model, venv, *args, **kwargs)
