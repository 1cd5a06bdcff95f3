"""Callbacks that put agents side by side in TensorBoard, and pictures of what BEN believes.

All of them can be named under ``callback:`` in the hyperparameters of rl-zoo3. The first two serve any SB3 algorithm::

    callback:
      - sb3_ben.callbacks.EpisodeStatsCallback
      - sb3_ben.callbacks.OracleCallback
      - sb3_ben.callbacks.BeliefCallback:
          n_steps: 20000
"""

from __future__ import annotations

import dataclasses
import io
import random
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import singledispatch
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch as th
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as MatplotlibFigure
from PIL import Image
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Figure, Logger, TensorBoardOutputFormat
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from sb3_ben.common.evaluation import evaluate_policy
from sb3_ben.envs.bandit import BanditConfig
from sb3_ben.envs.deep_sea import DeepSeaConfig
from sb3_ben.envs.search_and_rescue import SearchAndRescueConfig, door_cells
from sb3_ben.envs.tiger import TigerConfig
from sb3_ben.envs.world import World, WorldConfig
from sb3_ben.history.previous_reward import VecPreviousReward, attach_reward, previous_reward
from sb3_ben.history.samples import NO_ACTION
from sb3_ben.oracles import bandit, tiger
from sb3_ben.oracles.base import Oracle, OracleState
from sb3_ben.oracles.rescue_filter import RescueFilter
from sb3_ben.oracles.search_and_rescue import BeliefAgent

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from sb3_ben.ben.ben import BEN, BellmanDistribution

__all__ = [
    "BeliefCallback",
    "EpisodeStatsCallback",
    "OracleCallback",
    "custom_scalars_layout",
    "oracle_statistics",
    "untouched_rng",
]

NOT_STATISTICS = ("context", "terminal_observation", "TimeLimit.truncated")  # numbers in `info` that count nothing
ONLY_TENSORBOARD = ("stdout", "log", "json", "csv")
ORACLE_SEED = 70_000  # of the worlds in which an oracle without an exact value is measured
ACTIONS: dict[type[WorldConfig], tuple[str, ...]] = {
    TigerConfig: ("open 1", "open 2", "listen"),
    SearchAndRescueConfig: ("up", "down", "left", "right", "listen"),
}


def world_of(venv: VecEnv) -> World | None:
    """The world behind an environment, for its class and arguments; ``None`` where the environment is not one of ours."""
    return venv.get_attr("world")[0] if venv.has_attr("world") else None


def make_like(world: World, n_envs: int, seed: int | None = None, render_mode: str | None = None) -> VecEnv:
    """New episodes of the same environment with the same arguments."""
    view = getattr(import_module(type(world).__module__), f"{type(world).__name__}VecEnv")
    return view(n_envs, seed=seed, render_mode=render_mode, **dataclasses.asdict(world.config))


def summary_writer(logger: Logger) -> SummaryWriter | None:
    """The writer of a logger's TensorBoard events, ``None`` where it writes none."""
    return next((output.writer for output in logger.output_formats if isinstance(output, TensorBoardOutputFormat)), None)


# ---------------------------------------------------------------------- statistics of episodes


def episode_statistics(info: dict[str, Any]) -> dict[str, float]:
    """The numbers that an environment reports at the end of an episode."""
    is_number = {name: isinstance(value, (Real, np.bool_)) for name, value in info.items()}
    return {name: float(info[name]) for name in info if is_number[name] and name not in NOT_STATISTICS}


class EpisodeStatsCallback(BaseCallback):
    """Logs what the environment counts in ``info`` as ``episode/NAME``, averaged over the last episodes.

    In search and rescue these are ``episode/victims``, ``episode/hazards`` and ``episode/listens``: the same tags for every
    algorithm.

    :param window: number of episodes to average over
    :param verbose: verbosity level
    """

    def __init__(self, window: int = 100, verbose: int = 0) -> None:
        super().__init__(verbose)
        if window < 1:
            raise ValueError(f"`window` must be at least 1, got {window}")
        self._recent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=window))
        self._means: dict[str, float] = {}

    def _on_step(self) -> bool:
        ended = [info for info, done in zip(self.locals["infos"], self.locals["dones"], strict=True) if done]
        for info in ended:
            for name, value in episode_statistics(info).items():
                self._recent[name].append(value)
        if ended:
            self._means = {name: float(np.mean(values)) for name, values in self._recent.items()}
        for name, mean in self._means.items():  # every time, since whoever writes the log forgets what was recorded
            self.logger.record(f"episode/{name}", mean)
        return True


# ---------------------------------------------------------------------- the oracle


@singledispatch
def make_oracle(config: WorldConfig) -> Oracle | None:
    """The best agent that is known for a world."""
    return None


@make_oracle.register
def _(config: TigerConfig) -> Oracle:
    return tiger.BayesOptimal(config)


@make_oracle.register
def _(config: BanditConfig) -> Oracle:
    return bandit.BayesOptimal(config)


@make_oracle.register
def _(config: SearchAndRescueConfig) -> Oracle:
    return BeliefAgent(config)


@singledispatch
def exact_return(config: WorldConfig) -> float | None:
    """The largest expected return of an episode, where it can be computed."""
    return None


@exact_return.register
def _(config: TigerConfig) -> float:
    return tiger.bayes_optimal_values(config, discount=1.0, horizon=config.horizon).value


@exact_return.register
def _(config: BanditConfig) -> float:
    return bandit.bayes_optimal_value(config)


@exact_return.register
def _(config: DeepSeaConfig) -> float:
    return max(config.treasure - config.move_cost, 0.0)


def oracle_statistics(world: World, n_episodes: int = 50) -> dict[str, float]:
    """What the best known agent achieves: its ``return``, and what the environment counts.

    The return is exact where that is possible; all else is the mean of episodes that are played here, the same in every run.

    :param world: the world, whose class and arguments matter
    :param n_episodes: number of episodes to play
    :return: nothing for a world without an oracle
    """
    collected: dict[str, list[float]] = defaultdict(list)

    def collect(locals_: dict[str, Any], _: dict[str, Any]) -> None:
        if locals_["done"]:
            for name, value in episode_statistics(locals_["info"]).items():
                collected[name].append(value)

    statistics: dict[str, float] = {}
    oracle, exact = make_oracle(world.config), exact_return(world.config)
    if oracle is not None:
        venv = make_like(world, n_episodes, ORACLE_SEED)
        mean, _ = evaluate_policy(oracle, venv, n_episodes, callback=collect, warn=False)
        statistics = {"return": mean, **{name: float(np.mean(values)) for name, values in collected.items()}}
    return statistics if exact is None else {**statistics, "return": exact}


def custom_scalars_layout(statistics: Iterable[str] = ("victims", "hazards", "listens")) -> dict[str, dict[str, list[Any]]]:
    """The charts of TensorBoard's *custom scalars*, as ``SummaryWriter.add_custom_scalars`` takes them.

    :param statistics: what the environment counts; each has a chart of its own, with the oracle's line
    """
    charts = {
        "return": ["eval/mean_reward", "oracle/return"],
        "return while learning": ["rollout/ep_rew_mean", "oracle/return"],
        **{name: [f"episode/{name}", f"oracle/{name}"] for name in statistics},
        "uncertainty": ["uncertainty/epistemic", "uncertainty/aleatoric"],
    }
    return {"side by side": {title: ["Multiline", tags] for title, tags in charts.items()}}


class OracleCallback(BaseCallback):
    """Logs the score of the best known agent as ``oracle/return``, a horizontal line beside the learner's, and what it counts as
    ``oracle/NAME``; gives TensorBoard a *custom scalars* layout in which they share charts.

    Without ``value`` the environment must be one of ours to have a line; the layout is written in any case.

    :param value: the return to draw, where it is known; otherwise :func:`oracle_statistics` finds it
    :param n_episodes: number of episodes for what has to be measured
    :param verbose: verbosity level
    """

    def __init__(self, value: float | None = None, n_episodes: int = 50, verbose: int = 0) -> None:
        super().__init__(verbose)
        self.value = value
        self.n_episodes = n_episodes
        self.statistics: dict[str, float] = {}

    def _on_training_start(self) -> None:
        world = world_of(self.training_env)
        if self.value is not None:
            self.statistics = {"return": self.value}
        elif world is not None:
            with untouched_rng(ORACLE_SEED):
                self.statistics = oracle_statistics(world, self.n_episodes)
        writer = summary_writer(self.logger)
        if writer is not None:
            writer.add_custom_scalars(custom_scalars_layout(world.stats if world is not None else ()))

    def _on_step(self) -> bool:
        for name, value in self.statistics.items():
            self.logger.record(f"oracle/{name}", value, exclude=ONLY_TENSORBOARD)
        return True


# ---------------------------------------------------------------------- what BEN believes


@contextmanager
def untouched_rng(seed: int) -> Iterator[None]:
    """Draw random numbers from a seed of one's own, and leave all global generators as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with th.random.fork_rng():
        set_random_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


class ExactBelief:
    """The exact posterior in the course of an episode in which somebody else acts, in the form that pictures show.

    :param oracle: an agent that keeps this posterior in its state
    :param action_slot: where its state holds the last action
    """

    def __init__(self, oracle: Any, action_slot: int) -> None:
        self.oracle, self.action_slot = oracle, action_slot
        self._state: OracleState | None = None

    def after(self, observation: np.ndarray) -> Any:
        """The posterior after one more observation, which carries its reward."""
        _, self._state = self.oracle.predict(observation, self._state)
        return self.oracle.beliefs(self._state)[0]

    def act(self, actions: np.ndarray) -> None:
        """Somebody has acted."""
        assert self._state is not None, "an episode begins with an observation"
        self._state = (*self._state[: self.action_slot], actions, *self._state[self.action_slot + 1 :])


class ExactRescueBelief(ExactBelief):
    """For every door P(nothing), P(victim) and P(hazard); without the planning that the agents do on top of it."""

    def __init__(self, config: SearchAndRescueConfig) -> None:
        self.filter = RescueFilter(config)
        self._known = self.filter.initial(1)
        self._actions: np.ndarray | None = None

    def after(self, observation: np.ndarray) -> np.ndarray:
        rewards = previous_reward(observation)
        assert rewards is not None
        if self._actions is not None:
            self._known = self.filter.update(self._known, np.asarray(observation), self._actions, rewards.astype(float))
        return self.filter.posterior(self._known).doors[0]

    def act(self, actions: np.ndarray) -> None:
        self._actions = actions


@singledispatch
def exact_belief(config: Any) -> ExactBelief | None:
    """Whoever computes the exact posterior of a world."""
    return None


@exact_belief.register
def _(config: TigerConfig) -> ExactBelief:
    return ExactBelief(tiger.AlwaysListen(config), action_slot=3)


@exact_belief.register
def _(config: BanditConfig) -> ExactBelief:
    return ExactBelief(bandit.Greedy(config), action_slot=1)


@exact_belief.register
def _(config: SearchAndRescueConfig) -> ExactBelief:
    return ExactRescueBelief(config)


class Moment(NamedTuple):
    """One step of an episode.

    :param observation: what the agent sees, with the reward it has just received
    :param state: what it remembers, this observation included
    :param beliefs: what it believes of b, for each action
    :param action: what it does
    :param exact: the exact posterior, where there is one
    :param frame: a picture of the environment
    """

    observation: Any
    state: tuple[np.ndarray, ...]
    beliefs: BellmanDistribution
    action: int
    exact: Any
    frame: np.ndarray | None


class DoorValues(NamedTuple):
    """What BEN believes of opening each door of search and rescue.

    :param mean: predictive mean of b
    :param epistemic_std: its epistemic standard deviation
    """

    mean: np.ndarray
    epistemic_std: np.ndarray


class BeliefCallback(BaseCallback):
    """Logs pictures of what BEN believes in the course of one greedy episode, always in the same world.

    * ``belief/density``: the predicted density of b for each action, at the start, in the middle and at the end,
    * ``belief/spread``: epistemic and aleatoric standard deviation of each action over the episode,
    * ``belief/doors`` (search and rescue): BEN's value of opening each door, beside the exact posterior of what is behind it. The
      value is that of standing before the door with all that the agent remembers,
    * ``belief/episode``: the episode as an animation, with the exact posterior laid over the environment and BEN's values beside
      it; also written as ``beliefs/STEPS.gif`` into the folder of the log.

    Training goes on as if nothing had been drawn.

    :param n_steps: number of environment steps between two sets of pictures
    :param eval_env: where to play; by default a new environment like that of training
    :param folder: where to write the animations; by default the folder of the log
    :param max_frames: maximal number of steps in an animation, 0 for none
    :param n_samples: number of draws for each density
    :param seed: seed of the world and of the draws
    :param verbose: verbosity level
    """

    model: BEN

    def __init__(
        self,
        n_steps: int = 20_000,
        eval_env: VecEnv | None = None,
        folder: str | None = None,
        max_frames: int = 60,
        n_samples: int = 512,
        seed: int = 0,
        verbose: int = 0,
    ) -> None:
        super().__init__(verbose)
        if n_steps < 1:
            raise ValueError(f"`n_steps` must be at least 1, got {n_steps}")
        self.n_steps = n_steps
        self.eval_env = eval_env
        self.folder = folder
        self.max_frames = max_frames
        self.n_samples = n_samples
        self.seed = seed
        self._next = n_steps

    def _init_callback(self) -> None:
        if not hasattr(self.model, "bellman_distribution"):
            raise ValueError(f"BeliefCallback draws the beliefs of BEN; a {type(self.model).__name__} has none")
        if self.model.bellman == "point":
            raise ValueError("BeliefCallback has nothing to draw: with bellman='point' the flows are switched off")
        with untouched_rng(self.seed):
            venv = self._make_env() if self.eval_env is None else self.eval_env
        if venv.observation_space != self.model.observation_space:
            raise ValueError("The environment of training is wrapped: give BeliefCallback one like it as `eval_env`")
        if venv.num_envs != 1:
            raise ValueError(f"`eval_env` must be a single environment, got {venv.num_envs}")
        self.venv = venv if isinstance(venv, VecPreviousReward) else VecPreviousReward(venv)
        self.world = world_of(self.venv)
        self._next = (self.model.num_timesteps // self.n_steps + 1) * self.n_steps

    def _make_env(self) -> VecEnv:
        world = world_of(self.training_env)
        if world is not None:
            return make_like(world, 1, self.seed, render_mode="rgb_array")
        spec = self.training_env.get_attr("spec")[0]
        if spec is None:
            raise ValueError("The environment of training is not registered: give BeliefCallback one like it as `eval_env`")
        kwargs = {**spec.kwargs, "render_mode": "rgb_array" if self.max_frames else None}
        return DummyVecEnv([lambda: gym.make(spec.id, **kwargs)])

    def _on_step(self) -> bool:
        if self.num_timesteps >= self._next:
            self._next = (self.num_timesteps // self.n_steps + 1) * self.n_steps
            with untouched_rng(self.seed):
                self._log(self.play())
        return True

    def _log(self, moments: list[Moment]) -> None:
        names = action_names(self.world, len(moments[0].beliefs.mean))
        figures = {"density": density_figure(moments, names), "spread": spread_figure(moments, names)}
        if self.world is not None and isinstance(self.world.config, SearchAndRescueConfig):
            figures["doors"] = door_figure(moments, {step: self.door_values(moments[step]) for step in key_moments(moments)})
        for name, figure in figures.items():
            self.logger.record(f"belief/{name}", Figure(figure, close=False), exclude=ONLY_TENSORBOARD)
        self.logger.dump(self.num_timesteps)  # as EvalCallback does, so that pictures have the steps they belong to
        if moments[0].frame is not None:
            self._log_animation(animation(moments, names))

    def _log_animation(self, frames: list[Image.Image]) -> None:
        gif = encode_gif(frames)
        log_folder = self.logger.get_dir()
        folder = self.folder or (Path(log_folder) / "beliefs" if log_folder else None)
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"{self.num_timesteps}.gif").write_bytes(gif)
        writer = summary_writer(self.logger)
        if writer is not None:
            add_gif(writer, "belief/episode", gif, frames[0].size, self.num_timesteps)

    # ------------------------------------------------------------------ an episode

    def play(self) -> list[Moment]:
        """Play one episode and note at each step what BEN believes."""
        self.venv.seed(self.seed)
        observation: Any = self.venv.reset()
        exact = exact_belief(self.world.config) if self.world is not None else None
        moments: list[Moment] = []
        state, done = None, False
        while not done:
            posterior = None if exact is None else exact.after(observation)
            frame = self._frame(posterior) if len(moments) < self.max_frames else None
            beliefs = self.model.bellman_distribution(self._normalized(observation), state, n_samples=self.n_samples)
            actions, next_state = self.model.predict(self._normalized(observation), state, deterministic=True)
            believed = type(beliefs)(*(part[0] for part in beliefs))
            if exact is not None:
                exact.act(actions)
            assert next_state is not None, "a policy always remembers, if only its action"
            state = next_state
            moments.append(Moment(observation, state, believed, int(actions[0]), posterior, frame))
            observation, _, dones, _ = self.venv.step(actions)
            done = bool(dones[0])
        return moments

    def _normalized(self, observation: Any) -> Any:
        """The observation as the agent is used to it, still with its reward."""
        normalize = self.model.get_vec_normalize_env()
        rewards = previous_reward(observation)
        if normalize is None or rewards is None:
            return observation
        plain = dict(observation) if isinstance(observation, dict) else np.asarray(observation)
        return attach_reward(normalize.normalize_obs(plain), rewards)

    def _frame(self, posterior: Any) -> np.ndarray | None:
        arguments = {} if posterior is None else {"belief": posterior}
        return self.venv.env_method("render", **arguments)[0]

    def door_values(self, moment: Moment) -> DoorValues:
        """The value of opening each door, were the agent put before it with all that it remembers."""
        observations, state, actions = self.before_doors(moment)
        beliefs = self.model.bellman_distribution(observations, state, n_samples=self.n_samples)
        return DoorValues(*(part[np.arange(len(actions)), actions] for part in (beliefs.mean, beliefs.epistemic_std)))

    def before_doors(self, moment: Moment) -> tuple[Any, tuple[np.ndarray, ...], np.ndarray]:
        """Observations before all doors, what is remembered there, and the actions that open them.

        What the agent has just heard, it heard where it was: it is put elsewhere in a step of its own, without an action.
        """
        assert self.world is not None
        policy, (cells, actions) = self.model.policy, door_cells(self.world.config.grid_size)
        observations = np.repeat(np.asarray(moment.observation), len(cells), axis=0)
        observations[:, :2] = cells
        state = (*policy.repeat(moment.state, len(cells))[:-1], np.full(len(cells), NO_ACTION))
        return self._normalized(attach_reward(observations, np.zeros(len(cells), dtype=np.float32))), state, actions


# ---------------------------------------------------------------------- pictures
# Margins are fixed: matplotlib needs as long to find them as for all the rest of a picture.


def action_names(world: World | None, n_actions: int) -> tuple[str, ...]:
    """What the actions are called."""
    return ACTIONS.get(type(getattr(world, "config", None)), tuple(f"action {i}" for i in range(n_actions)))  # type: ignore[arg-type]


def colour(action: int) -> str:
    """A colour for each action, the same in all pictures."""
    return f"C{action % 10}"


def key_moments(moments: Sequence[Moment]) -> list[int]:
    """The first, the middle and the last step of an episode."""
    return sorted({0, len(moments) // 2, len(moments) - 1})


def density_figure(moments: Sequence[Moment], names: Sequence[str]) -> MatplotlibFigure:
    """Predicted densities of b, a panel for each of the key moments."""
    chosen = key_moments(moments)
    figure = MatplotlibFigure(figsize=(4 * len(chosen), 3.4))
    figure.subplots_adjust(left=0.12 / len(chosen), right=0.99, bottom=0.15, top=0.9, wspace=0.08)
    for axes, step in zip(figure.subplots(1, len(chosen), squeeze=False)[0], chosen, strict=True):
        samples = moments[step].beliefs.samples
        limits = np.quantile(samples, (0.01, 0.99))
        limits = limits + np.array([-1, 1]) * max(0.02 * np.ptp(limits), 1e-3)  # histograms need a range that is not empty
        for action, name in enumerate(names):
            style = {"histtype": "stepfilled", "alpha": 0.45, "color": colour(action)}
            axes.hist(samples[action], bins=40, range=tuple(limits), density=True, label=name, **style)
            axes.axvline(moments[step].beliefs.mean[action], color=colour(action), linewidth=1)
        axes.set(title=f"step {step}: chooses {names[moments[step].action]}", xlabel="b", yticks=[])
    figure.axes[0].set_ylabel("predicted density")
    figure.axes[0].legend(fontsize=8)
    return figure


def spread_figure(moments: Sequence[Moment], names: Sequence[str]) -> MatplotlibFigure:
    """Both standard deviations of b over the episode."""
    figure = MatplotlibFigure(figsize=(9, 3.4))
    figure.subplots_adjust(left=0.08, right=0.99, bottom=0.15, top=0.9, wspace=0.25)
    parts = {"epistemic: what it does not know": "epistemic_std", "aleatoric: what is left to chance": "aleatoric_std"}
    for axes, (title, part) in zip(figure.subplots(1, 2), parts.items(), strict=True):
        for action, name in enumerate(names):
            axes.plot([getattr(moment.beliefs, part)[action] for moment in moments], color=colour(action), label=name)
        axes.set(title=title, xlabel="step of the episode", ylabel="standard deviation of b")
        axes.set_ylim(bottom=0)
    figure.axes[0].legend(fontsize=8)
    return figure


def door_figure(moments: Sequence[Moment], values: Mapping[int, DoorValues]) -> MatplotlibFigure:
    """What BEN thinks of opening each door above, what may be behind it below; a column for each step in ``values``."""
    figure = MatplotlibFigure(figsize=(5 * len(values), 5))
    figure.subplots_adjust(left=0.21 / len(values), right=0.99, bottom=0.1, top=0.94, wspace=0.18, hspace=0.08)
    grid = figure.subplots(2, len(values), squeeze=False, sharex=True)
    for (step, value), (top, bottom) in zip(values.items(), grid.T, strict=True):
        doors, (_, victim, hazard) = np.arange(len(value.mean)), moments[step].exact.T
        top.bar(doors, value.mean, yerr=value.epistemic_std, color="tab:purple", error_kw={"elinewidth": 0.8})
        top.set_title(f"step {step}")
        bottom.bar(doors, victim, color="tab:green", label="P(victim)")
        bottom.bar(doors, hazard, bottom=victim, color="tab:red", label="P(hazard)")
        bottom.set(xlabel="door", ylim=(0, 1), xticks=doors[::4])
    grid[0, 0].set_ylabel("BEN: value of opening,\nepistemic deviation")
    grid[1, 0].set_ylabel("exact posterior")
    grid[1, 0].legend(fontsize=8)
    return figure


def animation(moments: Sequence[Moment], names: Sequence[str]) -> list[Image.Image]:
    """The environment with BEN's values beside it, a frame for each step that has a picture."""
    pictured = [(moment, moment.frame) for moment in moments if moment.frame is not None]
    panel = ValuePanel([moment for moment, _ in pictured], names, height=len(pictured[0][1]))
    return [_beside(frame, panel.draw(step, moment)) for step, (moment, frame) in enumerate(pictured)]


class ValuePanel:
    """BEN's values of the actions at a moment, with a thin line for chance and a thick one for what it does not know.

    What stays the same from frame to frame is drawn once, which is several times as fast as a new figure for each.

    :param moments: all that are to be drawn, which share one scale
    :param names: names of the actions
    :param height: in pixels
    """

    def __init__(self, moments: Sequence[Moment], names: Sequence[str], height: int) -> None:
        figure = MatplotlibFigure(figsize=(3.6, height / 100), dpi=100)
        figure.subplots_adjust(left=0.2, right=0.97, bottom=0.14, top=0.92)
        self.canvas, self.axes, self.names = FigureCanvasAgg(figure), figure.subplots(), names
        self.actions = np.arange(len(names))
        low = min((moment.beliefs.mean - moment.beliefs.aleatoric_std).min() for moment in moments)
        high = max((moment.beliefs.mean + moment.beliefs.aleatoric_std).max() for moment in moments)
        margin = 0.05 * (high - low) + 1e-3
        zeros = np.zeros(len(names))
        self.chance = self.axes.vlines(self.actions, zeros, zeros, "0.7", linewidth=1.5, label="aleatoric")
        self.doubt = self.axes.vlines(self.actions, zeros, zeros, "tab:purple", linewidth=5, label="epistemic")
        self.means = self.axes.scatter(self.actions, zeros, c=[colour(action) for action in range(len(names))], zorder=3)
        self.choice = self.axes.scatter(0, 0, s=160, facecolors="none", edgecolors="black", zorder=4)
        self.axes.set_xticks(self.actions, names, rotation=30, fontsize=8)
        self.axes.set(ylabel="b", xlim=(-0.5, len(names) - 0.5), ylim=(low - margin, high + margin))
        self.axes.legend(fontsize=8, loc="lower left")

    def draw(self, step: int, moment: Moment) -> np.ndarray:
        """The panel as pixels."""
        mean, action = moment.beliefs.mean, moment.action
        for lines, std in ((self.chance, moment.beliefs.aleatoric_std), (self.doubt, moment.beliefs.epistemic_std)):
            ends = np.stack((mean - std, mean + std), axis=1)
            lines.set_segments(list(np.stack(np.broadcast_arrays(self.actions[:, None], ends), axis=-1)))
        self.means.set_offsets(np.stack((self.actions, mean), axis=1))
        self.choice.set_offsets([[action, mean[action]]])
        self.axes.set_title(f"step {step}: {self.names[action]}")
        self.canvas.draw()
        return np.array(self.canvas.buffer_rgba())[..., :3]


def _beside(left: np.ndarray, right: np.ndarray) -> Image.Image:
    picture = Image.new("RGB", (left.shape[1] + right.shape[1], max(len(left), len(right))), "white")
    picture.paste(Image.fromarray(left), (0, 0))
    picture.paste(Image.fromarray(right), (left.shape[1], 0))
    return picture


def encode_gif(frames: Sequence[Image.Image], milliseconds: int = 500) -> bytes:
    """The frames as an animation that repeats for ever."""
    frames = [frame.quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE) for frame in frames]
    buffer = io.BytesIO()
    frames[0].save(buffer, format="GIF", save_all=True, append_images=frames[1:], duration=milliseconds, loop=0)
    return buffer.getvalue()


def add_gif(writer: SummaryWriter, tag: str, gif: bytes, size: tuple[int, int], step: int) -> None:
    """An animation among TensorBoard's images, as ``add_video`` does it, without the video library that it needs."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    image = Summary.Image(width=size[0], height=size[1], colorspace=3, encoded_image_string=gif)
    assert writer.file_writer is not None
    writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)
    writer.flush()
