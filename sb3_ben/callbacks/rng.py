"""Draws that leave no trace in training."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch as th
from stable_baselines3.common.utils import set_random_seed

__all__ = ["untouched_rng"]


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
