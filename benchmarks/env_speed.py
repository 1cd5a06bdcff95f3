"""Steps per second of the vectorised environments against SB3's ``DummyVecEnv`` of single ones, in one run.

python -m benchmarks.env_speed [--n-envs 64] [--seconds 3]
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from sb3_ben.envs import ENVIRONMENTS, make_vec


def steps_per_second(venv: VecEnv, seconds: float) -> float:
    """Step with random actions for about ``seconds``."""
    assert isinstance(venv.action_space, gym.spaces.Discrete)
    actions = np.random.default_rng(0).integers(venv.action_space.n, size=(256, venv.num_envs))
    venv.seed(0)
    venv.reset()
    n_steps, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        venv.step(actions[n_steps % len(actions)])
        n_steps += 1
    return n_steps * venv.num_envs / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n-envs", type=int, default=64, help="number of parallel environments")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each is measured")
    args = parser.parse_args()
    print(f"{'environment':24s}{'vectorised':>14s}{'DummyVecEnv':>14s}{'ratio':>8s}   (steps/s, {args.n_envs} envs)")
    for env_id in ENVIRONMENTS:
        fast = steps_per_second(make_vec(env_id, args.n_envs), args.seconds)
        slow = steps_per_second(DummyVecEnv([partial(gym.make, env_id)] * args.n_envs), args.seconds)
        print(f"{env_id:24s}{fast:14,.0f}{slow:14,.0f}{fast / slow:8.1f}", flush=True)


if __name__ == "__main__":
    main()
