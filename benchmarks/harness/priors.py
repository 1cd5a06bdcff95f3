"""Priors that experiments name as ``prior: {make: benchmarks.harness.priors.NAME, ...}``."""

from __future__ import annotations

import hashlib
import inspect
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from joblib import Memory
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import VecEnv

from sb3_ben.envs.search_and_rescue import SearchAndRescueConfig
from sb3_ben.oracles.rescue_learned import LearnedRescueBelief, learned_belief
from sb3_ben.oracles.rescue_prior import RescueTransitions
from sb3_ben.oracles.rescue_prior import config_of as config_of_env
from sb3_ben.oracles.tiger_prior import TigerModel
from sb3_ben.priors import Prior, PriorFactory

__all__ = ["rescue_learned", "rescue_weak", "tiger_model"]

#: what was learned before: agents of one seed that differ in how they act can start with the same belief
MEMORY = Memory(Path(__file__).resolve().parent.parent.parent / "results" / "beliefs", verbose=0)


def tiger_model() -> Prior:
    """The exact posterior and transition laws of the tiger problem, as in the paper."""
    return Prior(model=TigerModel())


def rescue_weak() -> PriorFactory:
    """The paper's weak prior: free moves, and what a door costs on average that is opened blindly."""
    return _weak_prior


def _weak_prior(env: VecEnv) -> Prior:
    return Prior(transitions=RescueTransitions(config_of_env(env), seed=int(np.random.randint(2**31))))


def rescue_learned(**kwargs: Any) -> PriorFactory:
    """A belief learned from random actions in simulated worlds, with the arguments of ``learned_belief``."""
    return partial(_learned_prior, **kwargs)


def _learned_prior(env: VecEnv, **kwargs: Any) -> Prior:
    return Prior(belief=_learned_once(config_of_env(env), int(np.random.randint(2**31)), code(), **kwargs))


def code() -> str:
    """A fingerprint of what learns a belief: after a change of it, what was learned before is of no use."""
    sources = [inspect.getsource(sys.modules[part.__module__]) for part in (learned_belief, SearchAndRescueConfig)]
    return hashlib.sha256("".join(sources).encode()).hexdigest()


@MEMORY.cache
def _learned_once(config: SearchAndRescueConfig, seed: int, code: str, **kwargs: Any) -> LearnedRescueBelief:
    set_random_seed(seed)
    return learned_belief(config, **kwargs)
