"""What our own worlds add to pictures that serve any environment. A world registers here whatever it has:

- names of its actions (:func:`action_names`)
- an exact posterior, which is laid over the environment (:func:`exact_belief`)
- pictures of its own (:func:`own_figures`)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import singledispatch
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from stable_baselines3.common.vec_env import VecEnv

from sb3_ben.callbacks.episode import ExactBelief, Moment, normalized
from sb3_ben.callbacks.pictures import key_moments
from sb3_ben.envs.bandit import BanditConfig
from sb3_ben.envs.search_and_rescue import SearchAndRescueConfig, door_cells
from sb3_ben.envs.tiger import TigerConfig
from sb3_ben.envs.world import World
from sb3_ben.history.previous_reward import attach_reward
from sb3_ben.history.samples import NO_ACTION
from sb3_ben.oracles import bandit, tiger
from sb3_ben.oracles.base import OracleState
from sb3_ben.oracles.rescue_filter import FilterState, RescueFilter
from sb3_ben.oracles.search_and_rescue import RescueOracle

if TYPE_CHECKING:
    from sb3_ben.ben.ben import BEN

__all__ = [
    "DoorValues",
    "action_names",
    "before_doors",
    "config_of",
    "door_figure",
    "door_values",
    "exact_belief",
    "make_like",
    "own_figures",
    "world_of",
]


def world_of(venv: VecEnv) -> World | None:
    """The world behind an environment, for its class and arguments; ``None`` where the environment is not one of ours."""
    world = venv.get_attr("world")[0] if venv.has_attr("world") else None
    return world if isinstance(world, World) else None  # others' worlds are their own matter, such as Box2D's


def config_of(venv: VecEnv) -> Any:
    """The arguments of the world behind an environment, by whose class all is registered; ``None`` where there is no world."""
    return getattr(world_of(venv), "config", None)


def make_like(world: World, n_envs: int, seed: int | None = None, render_mode: str | None = None) -> VecEnv:
    """New episodes of the same environment with the same arguments."""
    view = getattr(import_module(type(world).__module__), f"{type(world).__name__}VecEnv")
    return view(n_envs, seed=seed, render_mode=render_mode, **dataclasses.asdict(world.config))


# ---------------------------------------------------------------------- names of actions


@singledispatch
def action_names(config: Any) -> tuple[str, ...] | None:
    """What the actions of a world are called."""
    return None


@action_names.register
def _(config: TigerConfig) -> tuple[str, ...]:
    return "open 1", "open 2", "listen"


@action_names.register
def _(config: SearchAndRescueConfig) -> tuple[str, ...]:
    return "up", "down", "left", "right", "listen"


# ---------------------------------------------------------------------- exact posteriors


@singledispatch
def exact_belief(config: Any) -> ExactBelief | None:
    """Whoever computes the exact posterior of a world, in the form that its ``render(belief=...)`` takes."""
    return None


@exact_belief.register
def _(config: TigerConfig) -> ExactBelief:
    return ExactBelief(tiger.AlwaysListen(config))


@exact_belief.register
def _(config: BanditConfig) -> ExactBelief:
    return ExactBelief(bandit.Greedy(config))


@exact_belief.register
def _(config: SearchAndRescueConfig) -> ExactBelief:
    return ExactBelief(DoorWatcher(config))


class DoorWatcher(RescueOracle):
    """For every door P(nothing), P(victim) and P(hazard); without the planning that the agents do on top of it.

    :param config: the arguments of the environment
    """

    needs_reward = True
    action_entry = len(FilterState._fields)

    def __init__(self, config: SearchAndRescueConfig) -> None:
        super().__init__(config)
        self.filter = RescueFilter(config)

    def beliefs(self, state: OracleState) -> np.ndarray:
        """The posterior of every door, ``(n_envs, n_doors, 3)``."""
        return self.filter.posterior(FilterState(*state[:-1])).doors

    def _initial_state(self, n_envs: int) -> OracleState:
        return *self.filter.initial(n_envs), np.full(n_envs, NO_ACTION)

    def _act(
        self, observations: np.ndarray, rewards: np.ndarray, state: OracleState, deterministic: bool
    ) -> tuple[np.ndarray, OracleState]:
        *known, last = state
        return last, (*self.filter.update(FilterState(*known), observations, last, rewards), last)


# ---------------------------------------------------------------------- pictures of their own


@singledispatch
def own_figures(config: Any, model: BEN, moments: Sequence[Moment], n_samples: int) -> dict[str, Figure]:
    """The pictures that only this world has, by the last part of their tag ``belief/NAME``.

    :param config: the arguments of the world, ``None`` for an environment that is not one of ours
    :param model: who has played
    :param moments: the episode, step by step
    :param n_samples: number of draws for what is estimated
    """
    return {}


@own_figures.register(SearchAndRescueConfig)  # named, since to read it off the annotations all of these would be imported
def _(config: SearchAndRescueConfig, model: BEN, moments: Sequence[Moment], n_samples: int) -> dict[str, Figure]:
    values = {step: door_values(config, model, moments[step], n_samples) for step in key_moments(moments)}
    return {"doors": door_figure(moments, values)}


class DoorValues(NamedTuple):
    """What BEN believes of opening each door of search and rescue.

    :param mean: predictive mean of b
    :param epistemic_std: its epistemic standard deviation
    """

    mean: np.ndarray
    epistemic_std: np.ndarray


def door_values(config: SearchAndRescueConfig, model: BEN, moment: Moment, n_samples: int) -> DoorValues:
    """The value of opening each door, were the agent put before it with all that it remembers."""
    observations, state, actions = before_doors(config, model, moment)
    beliefs = model.bellman_distribution(observations, state, n_samples=n_samples)
    return DoorValues(*(part[np.arange(len(actions)), actions] for part in (beliefs.mean, beliefs.epistemic_std)))


def before_doors(config: SearchAndRescueConfig, model: BEN, moment: Moment) -> tuple[Any, tuple[np.ndarray, ...], np.ndarray]:
    """Observations before all doors, what is remembered there, and the actions that open them.

    What the agent has just heard, it heard where it was: it is put elsewhere in a step of its own, without an action.
    """
    cells, actions = door_cells(config.grid_size)
    observations = np.repeat(np.asarray(moment.observation), len(cells), axis=0)
    observations[:, :2] = cells
    state = (*model.policy.repeat(moment.state, len(cells))[:-1], np.full(len(cells), NO_ACTION))
    return normalized(model, attach_reward(observations, np.zeros(len(cells), dtype=np.float32))), state, actions


def door_figure(moments: Sequence[Moment], values: Mapping[int, DoorValues]) -> Figure:
    """What BEN thinks of opening each door above, what may be behind it below; a column for each step in ``values``."""
    figure = Figure(figsize=(5 * len(values), 5))
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
