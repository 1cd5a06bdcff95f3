"""The Bernoulli bandit."""

from typing import Any

import gymnasium as gym
import numpy as np

from sb3_ben.envs import make_vec


def test_rewards_follow_the_arms() -> None:
    n_envs, horizon, context = 400, 25, (0.2, 0.7, 1.0)
    venv: Any = make_vec("BernoulliBandit-v0", n_envs, seed=0, n_arms=3, horizon=horizon)
    venv.set_options({"context": context})
    observations = venv.reset()
    assert not np.any(observations)
    means = np.zeros(3)
    for t in range(24):
        observations, rewards, _, infos = venv.step(np.full(n_envs, t % 3))
        assert np.array_equal(observations, rewards)  # the observation is the reward bit
        means[t % 3] += rewards.mean() / 8
    assert np.all(abs(means - context) <= 4 * np.sqrt(0.25 / (8 * n_envs)))
    assert infos[0]["best_pulls"] == 8
    assert infos[0]["wins"] >= 8


def test_prior_is_uniform() -> None:
    venv = make_vec("BernoulliBandit-v0", 2000, seed=0)
    venv.reset()
    chances = np.array([info["context"] for info in venv.reset_infos])
    assert chances.shape == (2000, 2)
    assert abs(np.histogram(chances, bins=4, range=(0, 1))[0] / 4000 - 0.25).max() < 0.03
    assert abs(np.corrcoef(chances.T)[0, 1]) < 0.1


def test_episode_terminates() -> None:
    env = gym.make("BernoulliBandit-v0", horizon=2)
    env.reset(seed=0)
    assert env.step(0)[2:4] == (False, False)
    assert env.step(0)[2:4] == (True, False)
