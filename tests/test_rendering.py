"""Pictures: the right colours in the right places, the right words, and beliefs of the right shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.vec_env import VecVideoRecorder

from sb3_ben.envs import ENVIRONMENTS, register_envs
from sb3_ben.envs.bandit import BernoulliBandit, BernoulliBanditVecEnv
from sb3_ben.envs.rendering import WIDTH, describe, draw, render
from sb3_ben.envs.search_and_rescue import LISTEN, Rescue, SearchAndRescue, SearchAndRescueVecEnv, door_cells
from sb3_ben.envs.tiger import Tiger, TigerVecEnv
from sb3_ben.envs.world import World

register_envs()
VEC_ENVS: list[Any] = [TigerVecEnv, SearchAndRescueVecEnv, BernoulliBanditVecEnv]


def make_world(world_class: type[World], contexts: dict[int, Any] | None = None, n_envs: int = 1, **kwargs: Any) -> Any:
    world = world_class(n_envs, world_class.config_class.from_kwargs(**kwargs))
    world.rngs = [np.random.default_rng(i) for i in range(n_envs)]
    world.reset(range(n_envs), contexts)
    return world


def make_rescue(grid_size: int = 5, doors: tuple[int, ...] = (0, 7, 12, 19), n_victims: int = 2) -> SearchAndRescue:
    """A rescue with everybody in the middle of the square behind the given doors."""
    n_hazards = len(doors) - n_victims
    world = make_world(SearchAndRescue, grid_size=grid_size, n_victims=n_victims, n_hazards=n_hazards)
    positions = world.centres[list(doors)].reshape(-1, 2).astype(float)
    world.reset([0], {0: Rescue(np.array(doors, dtype=int), positions)})
    return world


def pixel(world: SearchAndRescue, position: np.ndarray) -> tuple[int, int]:
    """Row and column of a place of the grid: the room and what surrounds it fill the width of the picture but for a margin."""
    unit = WIDTH / (world.config.grid_size + 2.4)
    return round(WIDTH / 2 - unit * position[1]), round(WIDTH / 2 + unit * position[0])


def colour_at(image: np.ndarray, place: tuple[int, int]) -> str:
    red, green, blue = image[place].astype(int)
    if max(red, green, blue) - min(red, green, blue) < 30:
        return "grey"
    return "purple" if green < red - 30 and green < blue - 30 else ("red", "green", "blue")[int(np.argmax([red, green, blue]))]


def all_rescued(world: SearchAndRescue) -> None:
    """Walk to the doors of the victims and open them."""
    cells, openings = door_cells(world.config.grid_size)
    for door in world.doors[0, world.is_victim].copy():
        world.agent[0] = cells[door]
        world.step(openings[door, None])


@pytest.mark.parametrize("grid_size", [1, 5, 7, 15])
def test_everybody_is_where_they_are(grid_size: int) -> None:
    world = make_rescue(grid_size, doors=(0, 1, 2, 4 * grid_size - 1))
    image = draw(world, 0)
    assert image.dtype == np.uint8
    assert image.shape[1:] == (WIDTH, 3)
    colours = [colour_at(image, pixel(world, position)) for position in world.positions[0]]
    assert colours == ["green", "green", "red", "red"]
    assert colour_at(image, pixel(world, np.zeros(2))) == "purple"


def test_entities_are_drawn_at_their_continuous_positions() -> None:
    world = make_rescue()
    world.positions[0, 0] += (0.3, -0.2)
    image = draw(world, 0)
    assert colour_at(image, pixel(world, world.positions[0, 0])) == "green"
    assert colour_at(image, pixel(world, world.centres[0] - (0.1, 0))) == "grey"


def test_the_rescued_are_gone_and_the_hazards_stay() -> None:
    world = make_rescue()
    places = [pixel(world, position) for position in world.positions[0]]
    all_rescued(world)
    image = draw(world, 0)
    assert [colour_at(image, place) for place in places] == ["grey", "grey", "red", "red"]
    red, green, blue = np.moveaxis(image.astype(int), -1, 0)
    assert not np.any((green > red + 40) & (green > blue + 40))
    assert "V" not in describe(world, 0)
    assert "victims 2" in describe(world, 0)


def test_the_agent_moves() -> None:
    world = make_rescue()
    world.step(np.array([3]))
    image = draw(world, 0)
    assert colour_at(image, pixel(world, np.array([1, 0]))) == "purple"
    assert colour_at(image, pixel(world, np.zeros(2))) == "grey"


def test_what_was_heard_is_drawn_below_the_room() -> None:
    world = make_rescue()
    before = draw(world, 0)[WIDTH : WIDTH + 50]
    world.step(np.array([LISTEN]))
    after = draw(world, 0)[WIDTH : WIDTH + 50]
    assert np.any(before != after)


def test_nobody_there() -> None:
    world = make_rescue(doors=(), n_victims=0)
    assert draw(world, 0).shape[2] == 3
    assert "@" in describe(world, 0)


def test_belief_shows_at_its_door_only() -> None:
    world = make_rescue()
    nothing = np.tile([1.0, 0.0, 0.0], (world.config.n_doors, 1))
    plain = draw(world, 0)
    np.testing.assert_array_equal(draw(world, 0, nothing), plain)
    for door, (probabilities, colour) in {3: ((0.4, 0.6, 0.0), "green"), 10: ((0.4, 0.0, 0.6), "red")}.items():
        belief = nothing.copy()
        belief[door] = probabilities
        image = draw(world, 0, belief)
        rows, columns = np.nonzero((image != plain).any(axis=2))
        row, column = pixel(world, world.centres[door])
        reach = WIDTH / (world.config.grid_size + 2.4) / 2
        assert abs(rows - row).max() <= reach
        assert abs(columns - column).max() <= reach
        assert rows.min() > row - reach + 1 / 3 * reach  # filled to 0.6 of its height
        assert colour_at(image, (row + 10, column)) == colour


def test_belief_is_stacked() -> None:
    world = make_rescue(doors=(), n_victims=0)
    belief = np.tile([0.0, 0.5, 0.5], (world.config.n_doors, 1))
    image = draw(world, 0, belief)
    for centre in world.centres:
        row, column = pixel(world, centre)
        assert [colour_at(image, (row + step, column)) for step in (-15, 15)] == ["red", "green"]


@pytest.mark.parametrize(
    "belief", [np.zeros((20, 2)), np.zeros(20), np.full((20, 3), 0.5), np.full((20, 3), np.nan), [[-1, 1, 1]] * 20, 0.5]
)
@pytest.mark.parametrize("mode", ["ansi", "rgb_array"])
def test_bad_beliefs_about_doors(belief: Any, mode: str) -> None:
    with pytest.raises(ValueError, match="`belief` must"):
        render(make_rescue(), 0, mode, belief)


def test_text_of_a_rescue() -> None:
    world = make_rescue()
    lines = describe(world, 0).splitlines()
    assert [line.split() for line in lines[:3]] == [["V", ".", ".", ".", "."], [".", *"_____", "H"], [".", *"_____", "."]]
    assert lines[3].split() == ["H", "_", "_", "@", "_", "_", "."]
    assert lines[-2] == "heard 0.00 0.00 0.00 0.00"
    assert lines[-1] == "step 0/125   victims 0   hazards 0   listens 0"
    belief = np.tile([1.0, 0.0, 0.0], (20, 1))
    belief[0], belief[19] = (0.25, 0.7, 0.05), (0, 0, 1)
    lines = describe(world, 0, belief).splitlines()
    assert lines[0].split("|")[1].split() == ["v70", ".", ".", ".", "."]
    assert lines[1].split("|")[1].split()[-1] == "h100"


@pytest.mark.parametrize("door", [0, 1])
def test_tiger_and_gold(door: int) -> None:
    world = make_world(Tiger, {0: door})
    image = draw(world, 0).astype(int)
    halves = image[40:220, : WIDTH // 2], image[40:220, WIDTH // 2 :]
    orange, gold = (
        [np.sum(np.all(abs(half - colour) < 12, axis=2)) for half in halves] for colour in ((240, 145, 45), (247, 200, 64))
    )
    assert orange[door] > 1000 > 10 > orange[1 - door]
    assert gold[1 - door] > 1000 > 10 > gold[door]
    text = describe(world, 0)
    assert f"door {door + 1}: tiger" in text
    assert f"door {2 - door}: gold" in text
    assert text.endswith("step 0/11   golds 0   tigers 0   listens 0")


def test_state_and_belief_of_the_tiger_world() -> None:
    world = make_world(Tiger, {0: 0}, p_correct=1.0, p_wrong=0.0)
    centre, left = (318 - 17, WIDTH // 2), (318 - 17, WIDTH // 2 - 110)
    assert [colour_at(draw(world, 0), place) for place in (centre, left)] == ["purple", "grey"]
    world.step(np.array([2]))
    assert [colour_at(draw(world, 0), place) for place in (centre, left)] == ["grey", "purple"]
    assert "state s1" in describe(world, 0)
    assert "P(tiger behind door 1) = 0.895" in describe(world, 0, 0.8951)
    rows = np.flatnonzero((draw(world, 0, 0.9) != draw(world, 0, 0.1)).any(axis=(1, 2)))
    assert 230 < rows.min() < rows.max() < 270


@pytest.mark.parametrize("belief", [1.5, -0.1, np.nan, [0.5], [0.5, 0.5]])
def test_bad_beliefs_about_the_tiger(belief: Any) -> None:
    for mode in ("ansi", "rgb_array"):
        with pytest.raises(ValueError, match="`belief` must"):
            render(make_world(Tiger), 0, mode, belief)


@pytest.mark.parametrize("n_arms", [2, 10, 300])
def test_bars_of_the_bandit(n_arms: int) -> None:
    world = make_world(BernoulliBandit, {0: np.linspace(0, 1, n_arms)}, n_arms=n_arms)
    red, _, blue = np.moveaxis(draw(world, 0)[:240].astype(int), -1, 0)
    bars = blue > red + 15
    assert bars[:, : WIDTH // 2].sum() < bars[:, WIDTH // 2 :].sum()
    assert draw(world, 0, np.ones((n_arms, 2))).shape == draw(world, 0).shape


def test_belief_and_text_of_the_bandit() -> None:
    world = make_world(BernoulliBandit, {0: np.array([0.25, 0.75])})
    lines = describe(world, 0, np.array([[3, 1], [1, 1]])).splitlines()
    assert lines[0] == "arm 0: 0.250 #####............... Beta(3, 1)"
    assert lines[-1] == "step 0/20   wins 0   best pulls 0"
    changed = (draw(world, 0, np.array([[1, 1], [50, 50]])) != draw(world, 0, np.array([[1, 1], [1, 1]]))).any(axis=(0, 2))
    assert not changed[: WIDTH // 2].any()
    assert changed[WIDTH // 2 :].any()


@pytest.mark.parametrize("belief", [np.ones(2), np.ones((3, 2)), np.zeros((2, 2)), 0.5])
def test_bad_beliefs_about_arms(belief: Any) -> None:
    for mode in ("ansi", "rgb_array"):
        with pytest.raises(ValueError, match="`belief` must"):
            render(make_world(BernoulliBandit), 0, mode, belief)


def test_modes() -> None:
    world = make_world(Tiger)
    with pytest.warns(UserWarning, match="render mode"):
        assert render(world, 0, None) is None
    with pytest.raises(ValueError, match="`mode` must"):
        render(world, 0, "human")


def test_a_world_without_pictures_says_so() -> None:
    class Stranger:
        pass

    for function in (draw, describe):
        with pytest.raises(NotImplementedError, match="Stranger"):
            function(Stranger(), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["ansi", "rgb_array"])
@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_gymnasium_renders(env_id: str, mode: str) -> None:
    env = gym.make(env_id, render_mode=mode)
    check_env(env.unwrapped)
    env.reset(seed=0)
    env.step(env.action_space.sample())
    assert isinstance(env.render(), str if mode == "ansi" else np.ndarray)
    env.close()


@pytest.mark.parametrize("vec_env", VEC_ENVS)
def test_vectorised_environments_are_tiled(vec_env: Any) -> None:
    venv = vec_env(4, seed=0, render_mode="rgb_array")
    venv.reset()
    height, width, _ = venv.get_images()[0].shape
    assert venv.render().shape == (2 * height, 2 * width, 3)
    assert height % 2 == width % 2 == 0


def test_vector_env_draws_every_episode() -> None:
    vector_env = gym.make_vec("Tiger-v0", num_envs=3, render_mode="ansi")
    vector_env.reset(seed=0)
    pictures = vector_env.render()
    assert pictures is not None
    assert len(pictures) == 3


def test_video(tmp_path: Path) -> None:
    pytest.importorskip("moviepy")
    venv = SearchAndRescueVecEnv(1, seed=0, render_mode="rgb_array")
    recorder = VecVideoRecorder(venv, str(tmp_path), record_video_trigger=lambda step: step == 0, video_length=4)
    recorder.reset()
    for _ in range(5):
        recorder.step(np.array([LISTEN]))
    recorder.close()
    assert list(tmp_path.glob("*.mp4"))
