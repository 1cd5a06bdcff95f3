"""Priors that experiments name as ``prior: {make: benchmarks.harness.priors.NAME, ...}``."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.harness.references import config_of
from sb3_ben import make_vec
from sb3_ben.common.priors import Prior, Simulations
from sb3_ben.envs.search_and_rescue import SearchAndRescueConfig
from sb3_ben.oracles.rescue_prior import RescueBelief, RescueTransitions
from sb3_ben.oracles.search_and_rescue import KnowsTheMap
from sb3_ben.oracles.tiger_prior import TigerModel

__all__ = ["rescue_strong", "rescue_weak", "tiger_model"]

N_SIMULATED = 16  # environments side by side


def tiger_model() -> Prior:
    """The exact posterior and transition laws of the tiger problem, as in the paper."""
    return Prior(model=TigerModel())


def _rescue_config(env_id: str, **kwargs: Any) -> SearchAndRescueConfig:
    config = config_of(env_id, kwargs)
    assert isinstance(config, SearchAndRescueConfig), f"{env_id} is not search and rescue"
    return config


def rescue_weak(env_id: str) -> Prior:
    """The paper's weak prior: free moves, and what a door costs on average that is opened blindly."""
    return Prior(transitions=RescueTransitions(_rescue_config(env_id)))


def rescue_strong(env_id: str, n_steps: int = 100_000, belief: bool = False, **kwargs: Any) -> Prior:
    """The paper's strong prior: simulated worlds, half of them with a demonstrator who knows the map.

    :param env_id: of the environment
    :param n_steps: number of simulated steps
    :param belief: whether the exact filter joins the encoding of the history
    :param kwargs: arguments in which the simulated worlds differ
    """
    simulations = Simulations(
        make_env=partial(make_vec, env_id, N_SIMULATED, **kwargs),
        behaviour=KnowsTheMap,
        n_steps=n_steps,
        demonstrations=0.5,
        epsilon=0.1,
    )
    return Prior(simulations=simulations, belief=RescueBelief(_rescue_config(env_id)) if belief else None)
