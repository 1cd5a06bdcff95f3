"""The tiger problem, sentence by sentence from appendix E.1 of the paper."""

import gymnasium as gym
import numpy as np
import pytest

from sb3_ben.envs import make_vec
from sb3_ben.envs.tiger import LISTEN, OPEN_1, OPEN_2


@pytest.mark.parametrize("tiger", [0, 1])
@pytest.mark.parametrize("door", [OPEN_1, OPEN_2])
def test_opening(tiger: int, door: int) -> None:
    env = gym.make("Tiger-v0")
    observation, _ = env.reset(options={"context": tiger})
    assert observation == 0
    for n in range(1, 4):  # the tiger does not move
        env.step(LISTEN)
        observation, reward, terminated, _, info = env.step(door)
        assert observation == 0
        assert reward == (-500 if door == tiger else 10)
        assert not terminated
        assert (info["tigers"], info["golds"], info["listens"]) == ((n, 0, n) if door == tiger else (0, n, n))


@pytest.mark.parametrize(("p_correct", "p_wrong"), [(0.85, 0.10), (0.6, 0.4), (1.0, 0.0), (0.0, 0.3)])
@pytest.mark.parametrize("tiger", [0, 1])
def test_hearing_frequencies(p_correct: float, p_wrong: float, tiger: int) -> None:
    n_envs, horizon = 500, 20
    venv = make_vec("Tiger-v0", n_envs, seed=0, p_correct=p_correct, p_wrong=p_wrong, horizon=horizon)
    venv.set_options({"context": tiger})
    venv.reset()
    counts = np.zeros(3)
    for _ in range(horizon - 1):
        observations, rewards, _, _ = venv.step(np.full(n_envs, LISTEN))
        counts += np.bincount(np.asarray(observations), minlength=3)
        assert np.all(rewards == -1)
    expected = np.zeros(3)
    expected[[1 + tiger, 2 - tiger, 0]] = p_correct, p_wrong, 1 - p_correct - p_wrong
    n = n_envs * (horizon - 1)
    assert np.all(abs(counts / n - expected) <= 4 * np.sqrt(expected * (1 - expected) / n) + 1e-12)


def test_doors_are_equally_likely() -> None:
    venv = make_vec("Tiger-v0", 4000, seed=0)
    venv.reset()
    assert abs(np.mean([info["context"] for info in venv.reset_infos]) - 0.5) < 4 * 0.5 / np.sqrt(4000)


def test_rewards_are_arguments() -> None:
    env = gym.make("Tiger-v0", reward_tiger=-7.0, reward_gold=3.0, reward_listen=0.5)
    env.reset(options={"context": 0})
    assert [env.step(action)[1] for action in (OPEN_1, OPEN_2, LISTEN)] == [-7.0, 3.0, 0.5]
