"""Priors that experiments name as ``prior: {make: benchmarks.harness.priors.NAME, ...}``."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.harness.references import config_of
from sb3_ben.common.priors import Prior, PriorFactory
from sb3_ben.envs.search_and_rescue import SearchAndRescueConfig
from sb3_ben.oracles.rescue_learned import learned_filter
from sb3_ben.oracles.rescue_prior import RescueTransitions
from sb3_ben.oracles.tiger_prior import TigerModel

__all__ = ["rescue_learned", "rescue_weak", "tiger_model"]


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


def rescue_learned(**kwargs: Any) -> PriorFactory:
    """A belief learned from random actions in simulated worlds, with the arguments of ``learned_filter``."""
    return partial(learned_filter, **kwargs)
