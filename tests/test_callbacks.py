"""Callbacks for TensorBoard: statistics of episodes, the oracle's line, pictures of beliefs."""

from __future__ import annotations

import dataclasses
import io
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from matplotlib.figure import Figure
from PIL import Image
from rl_zoo3.utils import get_callback_list
from sb3_contrib import RecurrentPPO
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import FakeImageEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecMonitor, VecNormalize
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from sb3_ben import BEN, callbacks, make_vec
from sb3_ben.callbacks import BeliefCallback, EpisodeStatsCallback, OracleCallback, oracle_statistics, untouched_rng
from sb3_ben.callbacks.worlds import before_doors, door_values, own_figures
from sb3_ben.envs.search_and_rescue import SearchAndRescueConfig
from sb3_ben.envs.tiger import LISTEN, TigerConfig
from sb3_ben.history.previous_reward import VecPreviousReward, attach_reward
from sb3_ben.history.wrappers import PreviousActionReward
from sb3_ben.oracles import tiger
from sb3_ben.oracles.search_and_rescue import BeliefAgent
from sb3_ben.oracles.tiger_prior import TigerModel
from sb3_ben.priors import Prior

TINY: dict[str, Any] = {
    "learning_starts": 16,
    "batch_size": 4,
    "sequence_length": 5,
    "buffer_size": 500,
    "n_phi_samples": 2,
    "policy_kwargs": {"net_arch": [8], "rnn_hidden_size": 8, "phi_dim": 6},
    "seed": 0,
}
RESCUE = {"horizon": 6, "grid_size": 3, "n_victims": 1, "n_hazards": 1}


def tiny(env: Any, folder: Path | None = None, **kwargs: Any) -> BEN:
    log = None if folder is None else str(folder)
    return BEN("MlpGruPolicy", env, tensorboard_log=log, **{**TINY, **kwargs})


def events_of(folder: Path) -> EventAccumulator:
    """What a single run has written."""
    (run,) = folder.iterdir()
    events = EventAccumulator(str(run))
    events.Reload()
    return events


def layout_of(events: EventAccumulator) -> dict[str, list[str]]:
    """The charts of the custom scalars and their tags."""
    layout = Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    (category,) = layout.category
    return {chart.title: list(chart.multiline.tag) for chart in category.chart}


# ---------------------------------------------------------------------- statistics of episodes

MAKERS: dict[str, Callable[[VecEnv, str], Any]] = {
    "BEN": lambda env, log: tiny(env, Path(log)),
    "DQN": lambda env, log: DQN("MlpPolicy", env, learning_starts=1000, tensorboard_log=log),
    "RecurrentPPO": lambda env, log: RecurrentPPO("MlpLstmPolicy", env, n_steps=11, n_epochs=1, tensorboard_log=log),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("n_envs", [1, 3])
def test_every_algorithm_logs_the_same_statistics(name: str, n_envs: int, tmp_path: Path) -> None:
    model = MAKERS[name](VecMonitor(make_vec("Tiger-v0", n_envs, seed=0)), str(tmp_path))
    model.learn(11 * 6, callback=EpisodeStatsCallback(), log_interval=1)
    events = events_of(tmp_path)
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("episode/")]
    assert sorted(tags) == ["episode/golds", "episode/listens", "episode/tigers"]
    counts = np.array([[event.value for event in events.Scalars(tag)] for tag in tags])
    np.testing.assert_allclose(counts.sum(axis=0), 11, rtol=1e-6)  # every step is one of the three
    assert [event.step for event in events.Scalars(tags[0])][-1] <= model.num_timesteps


def test_statistics_are_those_of_the_last_episodes() -> None:
    callback = EpisodeStatsCallback(window=2)
    callback.init_callback(tiny("Tiger-v0"))
    recorded: dict[str, float] = {}
    callback.model._logger = type("Recorder", (), {"record": lambda _, key, value: recorded.update({key: value})})()
    infos = [{"victims": n, "is_success": np.bool_(n > 1), "context": 5, "name": "x", "array": np.ones(2)} for n in range(4)]
    callback.update_locals({"infos": infos, "dones": [True, False, True, True]})
    callback._on_step()
    assert recorded == {"episode/victims": 2.5, "episode/is_success": 1.0}
    with pytest.raises(ValueError, match="window"):
        EpisodeStatsCallback(window=0)


def test_the_zoo_can_name_them() -> None:
    prefix = "sb3_ben.callbacks."
    entries = [f"{prefix}EpisodeStatsCallback", f"{prefix}OracleCallback", {f"{prefix}BeliefCallback": {"n_steps": 7}}]
    made: list[Any] = get_callback_list({"callback": entries})
    assert [type(callback) for callback in made] == [EpisodeStatsCallback, OracleCallback, BeliefCallback]
    assert made[2].n_steps == 7


# ---------------------------------------------------------------------- the oracle


def test_the_oracle_is_a_line_and_has_a_layout(tmp_path: Path) -> None:
    tiny(VecMonitor(make_vec("Tiger-v0", 2, seed=0)), tmp_path).learn(66, callback=OracleCallback(n_episodes=4), log_interval=1)
    events = events_of(tmp_path)
    exact = tiger.bayes_optimal_values(TigerConfig(), discount=1.0, horizon=11).value
    values = [event.value for event in events.Scalars("oracle/return")]
    assert len(values) > 1
    np.testing.assert_allclose(values, exact, rtol=1e-6)
    counts = [events.Scalars(f"oracle/{name}")[0].value for name in ("golds", "tigers", "listens")]
    np.testing.assert_allclose(sum(counts), 11, rtol=1e-6)
    charts = layout_of(events)
    assert list(charts) == ["return", "return while learning", "golds", "tigers", "listens", "uncertainty"]
    assert charts["return"] == ["eval/mean_reward", "oracle/return"]
    assert set(charts["uncertainty"]) <= set(events.Tags()["scalars"]), "BEN logs what the chart shows"


def test_the_layout_of_search_and_rescue() -> None:
    charts = callbacks.custom_scalars_layout()["side by side"]
    assert {"return", "victims", "hazards", "listens", "uncertainty"} <= charts.keys()


def test_a_foreign_environment_has_a_layout_and_a_given_line(tmp_path: Path) -> None:
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=16, batch_size=16, n_epochs=1, tensorboard_log=str(tmp_path))
    model.learn(32, callback=[OracleCallback(value=500.0), OracleCallback()])
    events = events_of(tmp_path)
    assert {event.value for event in events.Scalars("oracle/return")} == {500.0}
    assert list(layout_of(events)) == ["return", "return while learning", "uncertainty"]


@pytest.mark.parametrize(
    ("env_id", "kwargs", "expected", "tolerance"),
    [
        ("BernoulliBandit-v0", {"horizon": 2}, 13 / 12, 1e-9),  # 1/2 and then 2/3 after a win, 1/2 after a loss
        ("DeepSea-v0", {}, 0.99, 1e-9),
        ("SearchAndRescue-v0", {**RESCUE, "horizon": 45}, 8.0, 2.0),  # one victim, less what listening costs
    ],
)
def test_oracle_returns(env_id: str, kwargs: dict[str, Any], expected: float, tolerance: float) -> None:
    statistics = oracle_statistics(make_vec(env_id, 1, **kwargs).world, n_episodes=20)
    assert statistics["return"] == pytest.approx(expected, abs=tolerance)


# ---------------------------------------------------------------------- what BEN believes


def test_random_numbers_are_left_alone() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(th.rand(1))

    random.seed(0)
    np.random.seed(0)
    th.manual_seed(0)
    with untouched_rng(1):
        inside = draw()
    outside = draw()
    with untouched_rng(1):
        assert draw() == inside
    random.seed(0)
    np.random.seed(0)
    th.manual_seed(0)
    assert draw() == outside != inside


@pytest.mark.parametrize(("n_envs", "normalize"), [(1, False), (3, True)])
def test_pictures_leave_training_as_it_is(n_envs: int, normalize: bool, tmp_path: Path) -> None:
    models: list[BEN] = []
    for callback in (None, [OracleCallback(n_episodes=2), BeliefCallback(n_steps=40, n_samples=8, max_frames=1)]):
        venv: VecEnv = VecMonitor(make_vec("SearchAndRescue-v0", n_envs, seed=0, **RESCUE))
        model = tiny(VecNormalize(venv) if normalize else venv, tmp_path / f"{len(models)}")
        models.append(model.learn(66, callback=callback))
    tags = events_of(tmp_path / "1").Tags()["images"]
    assert sorted(tags) == ["belief/density", "belief/doors", "belief/episode", "belief/spread"]
    plain, drawn = models
    for name, value in plain.policy.state_dict().items():
        assert th.equal(value, drawn.policy.state_dict()[name]), name
    np.testing.assert_array_equal(plain.replay_buffer.observations, drawn.replay_buffer.observations)
    if normalize:
        rms = [model.get_vec_normalize_env().obs_rms for model in models]  # type: ignore[union-attr]
        np.testing.assert_array_equal(rms[0].mean, rms[1].mean)  # type: ignore[union-attr]


def test_pictures_of_an_agent_with_a_belief(tmp_path: Path) -> None:
    """The belief is that of what was heard where the agent was, wherever it is imagined to stand."""
    venv = make_vec("SearchAndRescue5x5-v0", 2, seed=0, horizon=6)
    callback = BeliefCallback(n_steps=20, n_samples=8, max_frames=1)
    model = tiny(venv, tmp_path, prior="sb3_ben.oracles.rescue_prior.exact_filter").learn(40, callback=callback)
    assert "belief/doors" in events_of(tmp_path).Tags()["images"]
    for moment in callback.play():
        observations, state, _ = before_doors(callback.config, model, moment)
        _, after = model.predict(observations, state, deterministic=True)
        assert after is not None
        entry = model.policy._n_hidden + 4  # what the filter thinks of each door
        np.testing.assert_allclose(after[entry], np.repeat(moment.state[entry], len(observations), axis=0))


def test_pictures_of_the_tiger(tmp_path: Path) -> None:
    tiny(make_vec("Tiger-v0", 2, seed=0), tmp_path).learn(60, callback=BeliefCallback(n_steps=25, n_samples=16))
    events = events_of(tmp_path)
    assert [event.step for event in events.Images("belief/density")] == [26, 50]
    gif = events.Images("belief/episode")[-1].encoded_image_string
    assert (next(tmp_path.iterdir()) / "beliefs" / "50.gif").read_bytes() == gif
    picture: Any = Image.open(io.BytesIO(gif))
    assert (picture.format, picture.n_frames, picture.height) == ("GIF", 11, 400)


def test_pictures_of_a_foreign_environment(tmp_path: Path) -> None:
    pytest.importorskip("pygame")
    tiny("CartPole-v1", tmp_path).learn(20, callback=BeliefCallback(n_steps=20, n_samples=8, max_frames=2))
    assert sorted(events_of(tmp_path).Tags()["images"]) == ["belief/density", "belief/episode", "belief/spread"]


class Plain(gym.Env):
    """An environment with all that gymnasium lets it do without: it draws nothing, its actions are 5 and 6, and what it calls
    its world is none of ours."""

    observation_space = spaces.Box(0, 1, (1,))
    action_space = spaces.Discrete(2, start=5)
    world = "round"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.step_count = 0
        return np.zeros(1, dtype=np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.step_count += 1
        return np.full(1, self.step_count / 4, dtype=np.float32), float(action == 6), self.step_count == 4, False, {}


gym.register("Plain-v0", entry_point=lambda **kwargs: Plain(**kwargs))


@pytest.mark.parametrize("is_given", [False, True])
def test_pictures_of_an_environment_that_draws_nothing(is_given: bool, tmp_path: Path) -> None:
    callback = BeliefCallback(n_steps=20, n_samples=8, eval_env=DummyVecEnv([Plain]) if is_given else None)
    model = tiny(DummyVecEnv([lambda: gym.make("Plain-v0")]), tmp_path).learn(20, callback=[callback, OracleCallback()])
    assert sorted(events_of(tmp_path).Tags()["images"]) == ["belief/density", "belief/spread"]
    first = callback.play()[0]
    assert model.predict(first.observation, deterministic=True)[0] == 5 + first.action


def test_pictures_of_an_environment_of_images(tmp_path: Path) -> None:
    """SB3 puts the channels of images first; whoever gives an environment like that of training need not know it."""
    venv, like = (DummyVecEnv([lambda: FakeImageEnv(screen_height=36, screen_width=36, n_channels=1)]) for _ in range(2))
    small = {**TINY, "policy_kwargs": {"rnn_hidden_size": 8, "phi_dim": 6}}
    model = BEN("CnnLstmPolicy", venv, tensorboard_log=str(tmp_path), **small)
    model.learn(10, callback=BeliefCallback(n_steps=10, n_samples=8, eval_env=like))
    assert sorted(events_of(tmp_path).Tags()["images"]) == ["belief/density", "belief/spread"]


@dataclasses.dataclass(frozen=True)
class OwnConfig(TigerConfig):
    """A world that wants a picture of its own."""


@own_figures.register(OwnConfig)
def _(config: OwnConfig, model: BEN, moments: list[Any], n_samples: int) -> dict[str, Figure]:
    return {"own": Figure()}


def test_a_world_registers_its_pictures(tmp_path: Path) -> None:
    venv = make_vec("Tiger-v0", 1, seed=0)
    venv.world.config = OwnConfig()
    tiny("Tiger-v0", tmp_path).learn(20, callback=BeliefCallback(n_steps=20, n_samples=8, eval_env=venv))
    assert sorted(events_of(tmp_path).Tags()["images"]) == ["belief/density", "belief/own", "belief/spread"]


# ---------------------------------------------------------------------- models without a distribution of b

WITHOUT: dict[str, Callable[[], dict[str, Any]]] = {
    "exact model": lambda: {"prior": Prior(model=TigerModel())},
    "point": lambda: {"bellman": "point"},
}


@pytest.mark.parametrize("name", WITHOUT)
def test_without_a_distribution_training_goes_on_without_pictures(name: str, tmp_path: Path) -> None:
    models: list[BEN] = []
    callback = BeliefCallback(n_steps=20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for watched in (None, callback):
            model = tiny(make_vec("Tiger-v0", 2, seed=0), tmp_path / str(len(models)), **WITHOUT[name]())
            model.learn(48, callback=watched)
            models.append(model.learn(48, callback=watched, reset_num_timesteps=False))
    assert ["draws no pictures" in str(warning.message) for warning in caught].count(True) == 1
    assert [model.num_timesteps for model in models] == [96, 96]
    assert events_of(tmp_path / "1").Tags()["images"] == []
    plain, not_drawn = (model.policy.state_dict() for model in models)
    for key, value in plain.items():
        assert th.equal(value, not_drawn[key]), key


def test_the_same_callback_draws_where_there_is_a_distribution(tmp_path: Path) -> None:
    callback = BeliefCallback(n_steps=20, n_samples=8, max_frames=1)
    with pytest.warns(UserWarning, match="draws no pictures"):
        tiny("Tiger-v0", bellman="point").learn(4, callback=callback)
    tiny("Tiger-v0", tmp_path).learn(20, callback=callback)
    assert "belief/density" in events_of(tmp_path).Tags()["images"]


def test_pictures_go_on_when_training_does(tmp_path: Path) -> None:
    model, callback = tiny(make_vec("Tiger-v0", 2, seed=0), tmp_path), BeliefCallback(n_steps=25, n_samples=8, max_frames=1)
    model.learn(30, callback=callback)
    model.learn(30, callback=callback, reset_num_timesteps=False)
    assert [event.step for event in events_of(tmp_path).Images("belief/density")] == [26, 50]
    assert sorted(path.name for path in tmp_path.rglob("*.gif")) == ["26.gif", "50.gif"]


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="PPO has none"):
        PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8).learn(8, callback=BeliefCallback())
    with pytest.raises(ValueError, match="eval_env"):
        tiny(make_vec_env("Tiger-v0", wrapper_class=PreviousActionReward)).learn(1, callback=BeliefCallback())
    with pytest.raises(ValueError, match="single"):
        tiny("Tiger-v0").learn(1, callback=BeliefCallback(eval_env=make_vec("Tiger-v0", 2)))
    with pytest.raises(ValueError, match="n_steps"):
        BeliefCallback(n_steps=0)
    with pytest.raises(ValueError, match="n_samples"):
        BeliefCallback(n_samples=0)


def test_the_exact_belief_of_the_tiger_follows_whoever_acts() -> None:
    belief = callbacks.exact_belief(TigerConfig())
    assert belief is not None
    heard = [0, 1, 1, 2, 0]  # nothing yet, then the states after four listens
    for net, state in zip([0, 1, 2, 1, 1], heard, strict=True):
        observation: Any = attach_reward(np.array([state]), np.array([-1.0]))
        assert belief.after(observation) == pytest.approx(float(tiger.belief_after(TigerConfig(), net)))
        belief.act(np.array([LISTEN]))
    belief.act(np.array([0]))
    assert belief.after(attach_reward(np.array([0]), np.array([-500.0]))) == 1.0  # type: ignore[arg-type]


def test_the_exact_belief_of_search_and_rescue_is_that_of_the_oracle() -> None:
    config = SearchAndRescueConfig(**{**RESCUE, "horizon": 30})
    agent, belief = BeliefAgent(config), callbacks.exact_belief(config)
    assert belief is not None
    venv = VecPreviousReward(make_vec("SearchAndRescue-v0", 1, seed=3, **{**RESCUE, "horizon": 30}))
    observation: Any = venv.reset()
    state, changes, before = None, 0, None
    for _ in range(30):
        actions, state = agent.predict(observation, state)
        exact = belief.after(observation)
        np.testing.assert_allclose(exact, agent.door_posterior(state)[0], atol=1e-12)
        changes += before is not None and not np.allclose(exact, before)
        before = exact
        belief.act(actions)
        observation, _, _, _ = venv.step(actions)
    assert changes >= 2


def test_the_value_of_a_door_is_that_of_opening_it_from_before_it() -> None:
    kwargs = {"horizon": 4, "grid_size": 1, "n_victims": 1, "n_hazards": 1}  # one cell: the agent stands before all doors
    callback = BeliefCallback(n_samples=16, max_frames=0)
    callback.init_callback(tiny(make_vec("SearchAndRescue-v0", 2, **kwargs)).learn(40))
    for moment in callback.play():
        with untouched_rng(0):
            values = door_values(callback.config, callback.model, moment, callback.n_samples)
        observation: Any = attach_reward(np.asarray(moment.observation), np.zeros(1))
        state = callback.model.policy.with_actions(moment.state, np.array([-1]))
        with untouched_rng(0):
            beliefs = callback.model.bellman_distribution(observation, state, n_samples=16)
        np.testing.assert_allclose(values.mean, beliefs.mean[0, :4], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(values.epistemic_std, beliefs.epistemic_std[0, :4], rtol=1e-3, atol=1e-4)
