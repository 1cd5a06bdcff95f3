"""What every environment of the package owes its callers: Gymnasium's and SB3's contracts, in all three views."""

import pickle
import subprocess
import sys
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env as sb3_check_env
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecMonitor

from sb3_ben.envs import ENVIRONMENTS, make_vec

ENV_IDS = list(ENVIRONMENTS)
SMALL_HORIZON = 9


def small(env_id: str) -> dict[str, Any]:
    """The argument that makes an episode short: the horizon of deep sea is its size."""
    return {"size" if env_id.startswith("DeepSea") else "horizon": SMALL_HORIZON}


def random_actions(env: VecEnv | gym.Env, n_steps: int, n_envs: int, seed: int = 0) -> np.ndarray:
    assert isinstance(env.action_space, gym.spaces.Discrete)
    return np.random.default_rng(seed).integers(env.action_space.n, size=(n_steps, n_envs))


@pytest.mark.parametrize("env_id", ENV_IDS)
def test_checkers_pass_without_a_warning(env_id: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make_id in (env_id, f"sb3_ben:{env_id}"):
            check_env(gym.make(make_id).unwrapped)
            sb3_check_env(gym.make(make_id, render_mode="rgb_array").unwrapped)


@pytest.mark.parametrize("env_id", ENV_IDS)
def test_same_seed_same_episode(env_id: str) -> None:
    episodes = []
    for _ in range(2):
        env = gym.make(env_id)
        observation, info = env.reset(seed=7)
        rows: list[tuple] = [(observation, info["context"])]
        for action in random_actions(env, 50, 1)[:, 0]:
            observation, reward, terminated, truncated, info = env.step(action)
            rows.append((observation, reward, terminated, truncated, info["context"]))
            if terminated or truncated:
                env.reset()
        episodes.append(rows)
    assert all(np.array_equal(a[0], b[0]) and a[1:] == b[1:] for a, b in zip(*episodes, strict=True))


@pytest.mark.parametrize("env_id", ENV_IDS)
def test_vectorised_equals_single(env_id: str) -> None:
    """Slot i of the fast VecEnv plays, bit for bit, what the i-th environment of a DummyVecEnv plays, over several episodes."""
    n_envs = 3
    fast: Any = make_vec(env_id, n_envs, **small(env_id))
    slow: Any = DummyVecEnv([lambda: gym.make(env_id, **small(env_id))] * n_envs)
    for venv in (fast, slow):
        venv.seed(3)
    assert np.array_equal(fast.reset(), slow.reset())
    n_ended = 0
    for actions in random_actions(fast, 4 * SMALL_HORIZON, n_envs):
        (obs_a, rew_a, done_a, info_a), (obs_b, rew_b, done_b, info_b) = fast.step(actions), slow.step(actions)
        assert np.array_equal(obs_a, obs_b)
        assert obs_a.dtype == obs_b.dtype
        assert np.array_equal(rew_a, rew_b)
        assert rew_a.dtype == rew_b.dtype
        assert np.array_equal(done_a, done_b)
        n_ended += done_a.sum()
        for a, b in zip(info_a, info_b, strict=True):
            assert np.array_equal(a.pop("terminal_observation", 0), b.pop("terminal_observation", 0))
            assert a == b
        assert fast.reset_infos == slow.reset_infos
    assert n_ended == 4 * n_envs


@pytest.mark.parametrize("env_id", ENV_IDS)
def test_gymnasium_vector_env(env_id: str) -> None:
    n_envs = 3
    vector = gym.make_vec(env_id, n_envs, vectorization_mode="vector_entry_point", **small(env_id))
    fast: Any = make_vec(env_id, n_envs, seed=5, **small(env_id))
    observations, infos = vector.reset(seed=5)
    assert np.array_equal(observations, fast.reset())
    assert vector.observation_space.contains(observations)
    for actions in random_actions(fast, 2 * SMALL_HORIZON, n_envs):
        observations, rewards, terminated, truncated, infos = vector.step(actions)
        expected, expected_rewards, dones, fast_infos = fast.step(actions)
        assert np.array_equal(observations, expected)
        assert np.allclose(rewards, expected_rewards)
        assert np.array_equal(terminated | truncated, dones)
        for i in np.flatnonzero(dones):
            assert np.array_equal(infos["final_obs"][i], fast_infos[i]["terminal_observation"])
            assert infos["final_info"]["context"][i] == fast_infos[i]["context"]


@pytest.mark.parametrize("seed", [3, np.int64(3), [3, 4, 5], np.array([3, 4, 5])])
def test_gymnasium_vector_env_seeds(seed: Any) -> None:
    vector = gym.make_vec("SearchAndRescue5x5-v0", 3, vectorization_mode="vector_entry_point").unwrapped
    fast = make_vec("sb3_ben:SearchAndRescue5x5-v0", 3, seed=3)
    fast.reset()
    for _ in range(2):
        assert vector.reset(seed=seed)[1]["context"].tolist() == [info["context"] for info in fast.reset_infos]


def test_gymnasium_vector_env_refuses_bad_seeds_and_masks() -> None:
    vector = gym.make_vec("Tiger-v0", 3, vectorization_mode="vector_entry_point").unwrapped
    for seeds in ([1, 2], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match="seed"):
            vector.reset(seed=seeds)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reset_mask"):
        vector.reset(options={"reset_mask": np.array([True])})


def test_gymnasium_vector_env_resets_a_part() -> None:
    vector = gym.make_vec("Tiger-v0", 4, vectorization_mode="vector_entry_point")
    vector.reset(seed=0)
    for _ in range(3):
        vector.step(np.full(4, 2))
    _, infos = vector.reset(options={"reset_mask": np.array([True, False, True, False])})
    assert infos["listens"].tolist() == [0, 3, 0, 3]


@pytest.mark.parametrize("env_id", ENV_IDS)
def test_time_limit(env_id: str) -> None:
    venv = make_vec(env_id, 2, seed=0, **small(env_id))
    venv.reset()
    for t in range(1, SMALL_HORIZON + 1):
        _, _, dones, infos = venv.step(np.zeros(2, dtype=int))
        assert dones.tolist() == [t == SMALL_HORIZON] * 2
    assert infos[0]["TimeLimit.truncated"] == (env_id not in ("BernoulliBandit-v0", "DeepSea-v0", "DeepSea20-v0"))


def test_default_horizons() -> None:
    horizons = {env_id: make_vec(env_id).world.horizon for env_id in ENV_IDS}
    own = {"Tiger-v0": 11, "SearchAndRescue-v0": 245, "SearchAndRescue5x5-v0": 125, "BernoulliBandit-v0": 20}
    assert horizons == {**own, "DeepSea-v0": 10, "DeepSea20-v0": 20}


def test_long_horizons_draw_their_noise_in_blocks() -> None:
    env = gym.make("Tiger-v0", horizon=600)
    env.reset(seed=0)
    heard = [env.step(2)[0] for _ in range(600)]
    first, second = heard[:256], heard[256:512]
    assert first != second
    assert 0.75 < np.mean(np.array(heard) == 1 + env.unwrapped.world.contexts[0]) < 0.95  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("env_id", "kwargs", "name"),
    [
        ("Tiger-v0", {"p_correct": 1.2}, "p_correct"),
        ("Tiger-v0", {"p_correct": -0.1}, "p_correct"),
        ("Tiger-v0", {"p_wrong": 0.2}, "p_wrong"),
        ("Tiger-v0", {"p_wrong": float("nan")}, "p_wrong"),
        ("Tiger-v0", {"reward_tiger": "a lot"}, "reward_tiger"),
        ("Tiger-v0", {"reward_gold": float("inf")}, "reward_gold"),
        ("Tiger-v0", {"horizon": 0}, "horizon"),
        ("Tiger-v0", {"horizon": 2.5}, "horizon"),
        ("Tiger-v0", {"hearing": 0.9}, "hearing"),
        ("Tiger-v0", {"render_mode": "pixels"}, "render_mode"),
        ("SearchAndRescue-v0", {"grid_size": 6}, "grid_size"),
        ("SearchAndRescue-v0", {"grid_size": -1}, "grid_size"),
        ("SearchAndRescue-v0", {"n_victims": -1}, "n_victims"),
        ("SearchAndRescue-v0", {"n_hazards": -1}, "n_hazards"),
        ("SearchAndRescue-v0", {"n_victims": 20, "n_hazards": 9}, "n_hazards"),
        ("SearchAndRescue-v0", {"n_victims": True}, "n_victims"),
        ("SearchAndRescue-v0", {"sigma_noise": -0.1}, "sigma_noise"),
        ("SearchAndRescue-v0", {"horizon": -5}, "horizon"),
        ("SearchAndRescue-v0", {"sigma": 0.1}, "sigma"),
        ("BernoulliBandit-v0", {"n_arms": 1}, "n_arms"),
        ("BernoulliBandit-v0", {"horizon": 0}, "horizon"),
    ],
)
def test_bad_arguments_are_named(env_id: str, kwargs: dict[str, Any], name: str) -> None:
    for make in (gym.make, make_vec):
        with pytest.raises(ValueError, match=f"`{name}`"):
            make(env_id, **kwargs)


@pytest.mark.parametrize("n_envs", [0, -1, 2.5, "2"])
def test_bad_n_envs(n_envs: Any) -> None:
    with pytest.raises(ValueError, match="`n_envs`"):
        make_vec("Tiger-v0", n_envs)


def test_unknown_env_id() -> None:
    with pytest.raises(ValueError, match="Tiger-v0"):
        make_vec("Tiger-v1")


@pytest.mark.parametrize(
    ("env_id", "context"),
    [("Tiger-v0", 2), ("BernoulliBandit-v0", [0.5, 1.5]), ("BernoulliBandit-v0", [0.5]), ("SearchAndRescue-v0", 3)],
)
def test_bad_contexts(env_id: str, context: Any) -> None:
    with pytest.raises(ValueError, match="`context`"):
        gym.make(env_id).reset(options={"context": context})


def test_unknown_option() -> None:
    with pytest.raises(ValueError, match="contxt"):
        gym.make("Tiger-v0").reset(options={"contxt": 1})


def test_given_context_in_every_view() -> None:
    for context in (0, 1):
        options = {"context": context}
        assert gym.make("Tiger-v0").reset(options=options)[1]["context"] == context
        venv = make_vec("Tiger-v0", 3)
        venv.set_options(options)
        venv.reset()
        assert [info["context"] for info in venv.reset_infos] == [context] * 3
        assert gym.make_vec("Tiger-v0", 2).reset(options=options)[1]["context"].tolist() == [context] * 2


@pytest.mark.parametrize("actions", [np.array([0.5, 1.0]), np.array([0]), np.array([0, 3]), np.array([-1, 0])])
def test_bad_actions(actions: np.ndarray) -> None:
    venv = make_vec("Tiger-v0", 2)
    venv.reset()
    with pytest.raises(ValueError, match="`actions`"):
        venv.step(actions)


def test_step_needs_reset() -> None:
    env = gym.make("Tiger-v0", horizon=1).unwrapped
    with pytest.raises(gym.error.ResetNeeded):
        env.step(0)
    env.reset()
    env.step(0)
    with pytest.raises(gym.error.ResetNeeded):
        env.step(0)
    for unreset in (make_vec("Tiger-v0", 2), gym.make_vec("Tiger-v0", 2, vectorization_mode="vector_entry_point")):
        with pytest.raises(gym.error.ResetNeeded):
            unreset.step(np.array([2, 2]))


@pytest.mark.parametrize("env_id", ENV_IDS)
def test_sb3_learns_on_the_fast_vec_env(env_id: str) -> None:
    venv = VecMonitor(make_vec(env_id, 4, seed=0, **small(env_id)))
    model = PPO("MlpPolicy", venv, n_steps=16, batch_size=32, n_epochs=1, policy_kwargs={"net_arch": [8]}, seed=0)
    model.learn(64)
    assert len(model.ep_info_buffer or []) > 0


def test_vec_env_utilities() -> None:
    venv = make_vec("Tiger-v0", 3, render_mode="rgb_array")
    assert venv.get_attr("render_mode") == ["rgb_array"] * 3
    assert venv.get_attr("config", indices=[0])[0].horizon == 11
    assert venv.env_is_wrapped(gym.Wrapper) == [False] * 3
    venv.set_attr("label", "x")
    assert venv.get_attr("label", 1) == ["x"]
    with pytest.raises(NotImplementedError, match="set_attr"):
        venv.set_attr("label", "y", indices=0)
    with pytest.raises(NotImplementedError, match="horizon"):
        venv.set_attr("horizon", 3)
    venv.seed(0)
    venv.reset()
    assert venv.get_attr("contexts") == [info["context"] for info in venv.reset_infos]
    assert [image.shape[-1] for image in venv.env_method("render", indices=[0, 2])] == [3, 3]
    assert "door" in make_vec("Tiger-v0", 1, render_mode="ansi").env_method("render")[0].lower()
    with pytest.raises(NotImplementedError, match="close"):
        venv.env_method("close")
    with pytest.raises(AttributeError):
        venv.get_attr("nonsense")


def test_subprocess_and_pickle() -> None:
    venv: Any = make_vec_env("sb3_ben:SearchAndRescue5x5-v0", 2, seed=0, vec_env_cls=SubprocVecEnv)
    observations = venv.reset()
    venv.close()
    fast: Any = make_vec("SearchAndRescue5x5-v0", 2, seed=0)
    assert np.array_equal(observations, fast.reset())
    copied = pickle.loads(pickle.dumps(fast))
    actions = np.array([4, 4])
    assert np.array_equal(copied.step(actions)[0], fast.step(actions)[0])


def test_import_is_cheap() -> None:
    """Importing the package registers the environments and loads neither torch nor SB3."""
    code = (
        "import sys, sb3_ben, gymnasium; assert 'Tiger-v0' in gymnasium.registry; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'stable_baselines3', 'zuko', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
