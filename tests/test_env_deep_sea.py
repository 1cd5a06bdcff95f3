"""Deep sea."""

import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as sb3_check_env
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_ben.envs import make_vec
from sb3_ben.envs.deep_sea import DeepSea, DeepSeaConfig, action_mapping
from sb3_ben.envs.rendering import describe, draw


def dive(env: gym.Env, directions: list[bool]) -> tuple[list[np.ndarray], list[float], list[bool], dict]:
    """Go right where True, left where False; observations, rewards, ends and the last info."""
    obs, info = env.reset()
    world: Any = env.unwrapped.world  # type: ignore[attr-defined]
    observations, rewards, ends = [obs], [], []
    for goes_right in directions:
        right = world.mapping[0, world.elapsed[0], world.column[0]]
        obs, reward, terminated, truncated, info = env.step(int(right) if goes_right else 1 - int(right))
        assert not truncated
        observations.append(obs)
        rewards.append(float(reward))
        ends.append(terminated)
    return observations, rewards, ends, info


@pytest.mark.parametrize("env_id", ["DeepSea-v0", "DeepSea20-v0"])
def test_checkers_pass_without_a_warning(env_id: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make(env_id).unwrapped)
        sb3_check_env(gym.make(env_id, render_mode="rgb_array").unwrapped)


@pytest.mark.parametrize("size", [1, 4, 10])
def test_always_right_finds_the_treasure(size: int) -> None:
    observations, rewards, ends, info = dive(gym.make("DeepSea-v0", size=size), [True] * size)
    assert np.allclose(rewards[:-1], -0.01 / size)
    assert np.isclose(rewards[-1], 1 - 0.01 / size)
    assert np.isclose(sum(rewards), 0.99)
    assert ends == [False] * (size - 1) + [True]
    assert info["is_success"] == 1
    assert info["rights"] == size
    assert [int(obs.argmax()) for obs in observations[:-1]] == [row * (size + 1) for row in range(size)]  # the diagonal
    assert not observations[-1].any()


@pytest.mark.parametrize("mistake", range(5))
def test_one_step_left_loses_it(mistake: int) -> None:
    _, rewards, _, info = dive(gym.make("DeepSea-v0", size=5), [step != mistake for step in range(5)])
    assert info["is_success"] == 0
    assert np.isclose(sum(rewards), -0.01 * 4 / 5)


def test_going_left_is_free_and_stops_at_the_wall() -> None:
    observations, rewards, _, _ = dive(gym.make("DeepSea-v0", size=4), [True, False, False, False])
    assert np.allclose(rewards, [-0.0025, 0, 0, 0])
    assert [int(obs.argmax()) for obs in observations[:-1]] == [0, 4 + 1, 8, 12]


def test_costs_and_treasure_are_arguments() -> None:
    _, rewards, _, _ = dive(gym.make("DeepSea-v0", size=2, move_cost=0.5, treasure=7.0), [True, True])
    assert rewards == [-0.25, 6.75]


def test_mapping_is_fixed_by_its_seed_and_not_by_that_of_the_episode() -> None:
    env = gym.make("DeepSea-v0")
    mappings = []
    for seed in (0, 1):
        env.reset(seed=seed)
        mappings.append(env.unwrapped.world.mapping[0].copy())  # type: ignore[attr-defined]
    assert np.array_equal(*mappings)
    assert np.array_equal(mappings[0], action_mapping(10, 0))
    assert not np.array_equal(action_mapping(10, 0), action_mapping(10, 1))
    assert 0.3 < action_mapping(40, 0).mean() < 0.7
    with pytest.raises(ValueError, match="read-only"):
        action_mapping(10, 0)[0, 0] = 1


def test_given_mapping() -> None:
    env = gym.make("DeepSea-v0")
    assert env.reset(options={"context": 3})[1]["context"] == 3
    assert np.array_equal(env.unwrapped.world.mapping[0], action_mapping(10, 3))  # type: ignore[attr-defined]
    assert env.reset()[1]["context"] == 0
    for context in (-1, 0.5, True, "right"):
        with pytest.raises(ValueError, match="`context`"):
            env.reset(options={"context": context})


def test_all_views_agree() -> None:
    size, n_envs = 5, 3
    fast: Any = make_vec("DeepSea-v0", n_envs, seed=0, size=size)
    slow: Any = DummyVecEnv([lambda: gym.make("DeepSea-v0", size=size)] * n_envs)
    vector: Any = gym.make_vec("DeepSea-v0", n_envs, vectorization_mode="vector_entry_point", size=size)
    assert np.array_equal(fast.reset(), slow.reset())
    assert np.array_equal(vector.reset(seed=0)[0], slow.reset())
    for actions in np.random.default_rng(0).integers(2, size=(4 * size, n_envs)):
        (obs, rewards, dones, infos), (slow_obs, slow_rewards, slow_dones, slow_infos) = fast.step(actions), slow.step(actions)
        vector_obs, vector_rewards, terminated, truncated, _ = vector.step(actions)
        assert np.array_equal(obs, slow_obs)
        assert np.array_equal(obs, vector_obs)
        assert np.array_equal(rewards, slow_rewards)
        assert np.allclose(rewards, vector_rewards)
        assert np.array_equal(dones, slow_dones)
        assert np.array_equal(terminated, dones)
        assert not truncated.any()
        for info, slow_info in zip(infos, slow_infos, strict=True):
            assert np.array_equal(info.pop("terminal_observation", 0), slow_info.pop("terminal_observation", 0))
            assert info == slow_info


def test_random_actions_succeed_once_in_two_to_the_size() -> None:
    n_envs, size = 5000, 4
    venv: Any = make_vec("DeepSea-v0", n_envs, seed=0, size=size)
    venv.reset()
    rng = np.random.default_rng(0)
    for _ in range(size):
        infos = venv.step(rng.integers(2, size=n_envs))[3]
    assert abs(np.mean([info["is_success"] for info in infos]) - 2**-size) < 4 * np.sqrt(2**-size / n_envs)


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"size": 0}, "size"),
        ({"size": 2.5}, "size"),
        ({"mapping_seed": -1}, "mapping_seed"),
        ({"move_cost": -0.1}, "move_cost"),
        ({"treasure": float("nan")}, "treasure"),
        ({"horizon": 3}, "horizon"),
    ],
)
def test_bad_arguments_are_named(kwargs: dict[str, Any], name: str) -> None:
    for make in (gym.make, make_vec):
        with pytest.raises(ValueError, match=f"`{name}`"):
            make("DeepSea-v0", **kwargs)


def test_pictures() -> None:
    world = DeepSea(1, DeepSeaConfig(size=4))
    world.reset([0])
    rows = describe(world, 0).split("\n")
    assert rows[:4] == ["O...", "....", "....", "...$"]
    belief = np.zeros((4, 4))
    belief[2, 1] = 0.3
    assert describe(world, 0, belief).split("\n")[2] == "0900"
    assert not np.array_equal(draw(world, 0), draw(world, 0, belief))
    before = draw(world, 0)
    for _ in range(4):
        world.step(action_mapping(4, 0)[world.elapsed, world.column])
    assert describe(world, 0).split("\n")[3:5] == ["...$", "   O"]
    assert before.shape == draw(world, 0).shape
    assert not np.array_equal(before, draw(world, 0))
    for bad in (np.zeros(4), -np.ones((4, 4))):
        with pytest.raises(ValueError, match="`belief`"):
            draw(world, 0, bad)
