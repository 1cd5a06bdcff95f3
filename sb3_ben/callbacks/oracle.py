"""The best known agent of a world, as a line beside the learner's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import singledispatch
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

from sb3_ben.callbacks.rng import untouched_rng
from sb3_ben.callbacks.statistics import episode_statistics
from sb3_ben.callbacks.tensorboard import ONLY_TENSORBOARD, summary_writer
from sb3_ben.callbacks.worlds import make_like, world_of
from sb3_ben.common.evaluation import evaluate_policy
from sb3_ben.envs.bandit import BanditConfig
from sb3_ben.envs.deep_sea import DeepSeaConfig
from sb3_ben.envs.search_and_rescue import SearchAndRescueConfig
from sb3_ben.envs.tiger import TigerConfig
from sb3_ben.envs.world import World, WorldConfig
from sb3_ben.oracles import bandit, tiger
from sb3_ben.oracles.base import Oracle
from sb3_ben.oracles.search_and_rescue import BeliefAgent

__all__ = ["OracleCallback", "custom_scalars_layout", "exact_return", "make_oracle", "oracle_statistics"]

ORACLE_SEED = 70_000  # of the worlds in which an oracle without an exact value is measured


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
    oracle, exact = make_oracle(world.config), exact_return(world.config)
    measured = {} if oracle is None else _measured(oracle, world, n_episodes)
    return measured if exact is None else {**measured, "return": exact}


def _measured(oracle: Oracle, world: World, n_episodes: int) -> dict[str, float]:
    """Means over episodes in new worlds."""
    collected: dict[str, list[float]] = defaultdict(list)

    def collect(locals_: dict[str, Any], _: dict[str, Any]) -> None:
        if locals_["done"]:
            for name, value in episode_statistics(locals_["info"]).items():
                collected[name].append(value)

    venv = make_like(world, n_episodes, ORACLE_SEED)
    mean, _ = evaluate_policy(oracle, venv, n_episodes, callback=collect, warn=False)
    return {"return": mean, **{name: float(np.mean(values)) for name, values in collected.items()}}


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
