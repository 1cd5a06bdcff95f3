"""Search and rescue, sentence by sentence from appendix E.4 of the paper."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from sb3_ben.envs import make_vec
from sb3_ben.envs.search_and_rescue import DIRECTIONS, DOWN, LEFT, LISTEN, RIGHT, UP, Rescue, door_cells, door_centres

N = 5
CENTRES = door_centres(N)
UPPER_LEFT, LEFT_TOP = 0, 14  # the two doors of the corner cell (-2, 2)


def mission(victims: list[int], hazards: list[int], sigma_noise: float = 0.0, **kwargs: Any) -> gym.Env:
    """A 5x5 mission with entities at the centres of the given doors."""
    env = gym.make(
        "SearchAndRescue-v0", grid_size=N, n_victims=len(victims), n_hazards=len(hazards), sigma_noise=sigma_noise, **kwargs
    )
    doors = np.array(victims + hazards, dtype=int)
    env.reset(seed=0, options={"context": Rescue(doors, CENTRES[doors].astype(float))})
    return env


def go(env: gym.Env, *actions: int) -> tuple[np.ndarray, float, dict]:
    for action in actions:
        observation, reward, *_, info = env.step(action)
    return observation, float(reward), info


def walk_to(cell: np.ndarray) -> list[int]:
    x, y = cell
    return [RIGHT if x > 0 else LEFT] * abs(x) + [UP if y > 0 else DOWN] * abs(y)


def test_geometry() -> None:
    cells, actions = door_cells(N)
    assert len(cells) == 4 * N
    assert len({tuple(c) for c in CENTRES.tolist()}) == 4 * N
    assert np.all(abs(cells).max(axis=1) == 2)
    assert np.all(abs(CENTRES).max(axis=1) == 3)
    assert np.array_equal(cells + DIRECTIONS[actions], CENTRES)


@pytest.mark.parametrize(("action", "end"), [(UP, (0, 1)), (DOWN, (0, -1)), (LEFT, (-1, 0)), (RIGHT, (1, 0)), (LISTEN, (0, 0))])
def test_moves(action: int, end: tuple[int, int]) -> None:
    env = mission([3], [8])
    observation, reward, _ = go(env, action)
    assert tuple(observation[:2]) == end
    assert reward == (-1 if action == LISTEN else 0)


@pytest.mark.parametrize("door", range(4 * N))
def test_a_door_opened_from_its_cell(door: int) -> None:
    """Every door, whatever its side: the agent stays put, a victim pays 10, a hazard costs 100, nothing gives nothing."""
    cells, actions = door_cells(N)
    other = (door + 1) % (4 * N)
    path, opening = walk_to(cells[door]), int(actions[door])
    for victims, hazards, expected in (([door], [other], 10), ([other], [door], -100), ([other], [(door + 2) % (4 * N)], 0)):
        observation, reward, _ = go(mission(victims, hazards), *path, opening)
        assert reward == expected
        assert np.array_equal(observation[:2], cells[door])


def test_corner_cell_has_two_doors() -> None:
    to_corner = walk_to(np.array([-2, 2]))
    env = mission([UPPER_LEFT], [LEFT_TOP])
    assert go(env, *to_corner, UP)[1] == 10
    assert go(env, LEFT)[1] == -100
    assert np.array_equal(CENTRES[[UPPER_LEFT, LEFT_TOP]], [[-2, 3], [-3, 2]])


def test_rescued_victim_is_gone() -> None:
    """A victim pays once, and is then so far away that its reading is 0."""
    env = mission([2], [8])
    observation, reward, info = go(env, UP, UP, LISTEN, UP)
    assert reward == 10
    assert info["victims"] == 1
    assert observation[2] > 0  # readings are kept until the next listen
    assert go(env, UP)[1:] == (0.0, {**info})
    observation, reward, _ = go(env, LISTEN)
    assert reward == -1
    assert observation[2] == 0
    assert observation[3] > 0


def test_hazard_stays() -> None:
    env = mission([8], [2])
    rewards = [go(env, action)[1] for action in (UP, UP, UP, UP)]
    assert rewards == [0, 0, -100, -100]
    assert go(env, UP)[2]["hazards"] == 3


def test_readings() -> None:
    """exp(-distance^2 / N), 0 before the first listen, refreshed by listening only and kept in between."""
    env = mission([2], [8])  # at (0, 3) and (1, -3)
    assert not np.any(env.reset(options={"context": Rescue(np.array([2, 8]), CENTRES[[2, 8]].astype(float))})[0])
    assert not np.any(go(env, UP)[0][2:])
    heard = go(env, LISTEN)[0][2:]
    assert heard == pytest.approx(np.exp([-4 / N, -17 / N]))
    assert np.array_equal(go(env, UP, LEFT)[0][2:], heard)
    assert go(env, LISTEN)[0][2:] == pytest.approx(np.exp([-2 / N, -(4 + 25) / N]))
    assert go(env, UP)[2]["listens"] == 2


@pytest.mark.parametrize("sigma", [0.1, 1.0])
def test_noise_on_the_logarithm(sigma: float) -> None:
    n_envs = 3000
    venv = make_vec("SearchAndRescue5x5-v0", n_envs, seed=0, sigma_noise=sigma)
    venv.reset()
    observations = np.asarray(venv.step(np.full(n_envs, LISTEN))[0], dtype=float)
    positions = np.stack([info["context"].positions for info in venv.reset_infos])
    noise = np.log(observations[:, 2:]) + (positions**2).sum(-1) / N
    assert noise.std() == pytest.approx(sigma, rel=0.03)
    assert abs(noise.mean()) < 4 * sigma / np.sqrt(noise.size)
    assert abs(np.corrcoef(noise.T) - np.eye(8)).max() < 0.1


def test_context_prior() -> None:
    """Distinct doors, all equally likely for everybody, places uniform within the square behind the door."""
    venv = make_vec("SearchAndRescue5x5-v0", 4000, seed=0)
    venv.reset()
    contexts = [info["context"] for info in venv.reset_infos]
    doors = np.stack([context.doors for context in contexts])
    assert all(len(set(row)) == 8 for row in doors.tolist())
    frequency = np.stack([np.bincount(doors[:, k], minlength=20) for k in range(8)]) / 4000
    assert abs(frequency - 0.05).max() < 4.5 * np.sqrt(0.05 * 0.95 / 4000)
    offsets = np.stack([context.positions - CENTRES[context.doors] for context in contexts]).reshape(-1, 2)
    assert abs(offsets).max() <= 0.5
    assert offsets.var(axis=0) == pytest.approx([1 / 12, 1 / 12], rel=0.03)


def test_same_noise_whatever_the_actions() -> None:
    """Agents compared on one seed meet the same worlds and the same noise at the same step."""
    heard = []
    for path in ([UP, DOWN], [LISTEN, LISTEN]):
        env = gym.make("SearchAndRescue5x5-v0")
        env.reset(seed=4)
        heard.append(go(env, *path, LISTEN)[0])
    assert np.array_equal(heard[0], heard[1])


@pytest.mark.parametrize(
    "kwargs", [{"grid_size": 1}, {"n_victims": 0}, {"n_hazards": 0}, {"n_victims": 20}, {"sigma_noise": 20.0}]
)
def test_corner_cases_stay_inside_the_spaces(kwargs: dict) -> None:
    kwargs = {"grid_size": 7, "n_victims": 2, "n_hazards": 2} | kwargs
    venv = make_vec("SearchAndRescue-v0", 8, seed=0, **kwargs)
    venv.reset()
    for actions in np.random.default_rng(0).integers(5, size=(60, 8)):
        observations, rewards, _, _ = venv.step(actions)
        assert all(venv.observation_space.contains(row) for row in np.asarray(observations))
        assert np.isfinite(rewards).all()


def test_context_must_fit() -> None:
    env = gym.make("SearchAndRescue5x5-v0")
    doors = np.arange(8)
    for bad in (
        Rescue(np.zeros(8, dtype=int), CENTRES[doors].astype(float)),
        Rescue(doors + 13, CENTRES[doors].astype(float)),
        Rescue(doors, np.zeros((8, 2))),
        Rescue(doors[:3], CENTRES[:3].astype(float)),
    ):
        with pytest.raises(ValueError, match="`context`"):
            env.reset(options={"context": bad})


def test_contexts_are_immutable_copies() -> None:
    doors = np.arange(8)
    context = Rescue(doors, CENTRES[doors].tolist())
    doors[0] = 19
    assert context.doors[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        context.doors[0] = 3


def test_rewards_are_arguments() -> None:
    env = mission([2], [UPPER_LEFT], reward_victim=3.0, reward_hazard=-4.0, reward_listen=-0.5)
    assert go(env, LISTEN)[1] == -0.5
    assert go(env, UP, UP, UP)[1] == 3.0
    assert go(env, LEFT, LEFT, UP)[1] == -4.0
