"""What is known before the first step: a prior over phi, and domain knowledge in four forms that can be combined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

import torch as th
from stable_baselines3.common.vec_env import VecEnv
from torch.distributions import Distribution

from sb3_ben.priors.filters import Belief
from sb3_ben.priors.models import BellmanModel
from sb3_ben.priors.simulations import Simulations
from sb3_ben.priors.transitions import Transitions

__all__ = ["Prior", "PriorFactory", "check_phi_prior"]


@dataclass
class Prior:
    """Everything that is known before the first step; all parts are optional and can be combined.

    :param phi: prior over phi, any distribution of ``torch`` or ``zuko`` over vectors of ``phi_dim`` coordinates
    :param transitions: draws known transitions, ``n -> Transitions``
    :param simulations: histories from environments drawn from the prior
    :param model: exact posterior and transition laws of a few MDPs, used in place of both flows
    :param belief: a filter whose features join the learned encoding of the history
    """

    phi: Distribution | None = None
    transitions: Callable[[int], Transitions] | None = None
    simulations: Simulations | None = None
    model: BellmanModel | None = None
    belief: Belief | None = None

    def __post_init__(self) -> None:
        kinds: dict[str, tuple[Any, str]] = {
            "phi": (Distribution, "a distribution"),
            "simulations": (Simulations, "Simulations(...)"),
            "model": (BellmanModel, "a filter with `size`, initial(), update(), features() and outcomes()"),
            "belief": (Belief, "a filter with `size`, initial(), update() and features()"),
        }
        for name, (kind, description) in kinds.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"`{name}` of a prior must be {description}, got {value!r}")
        if self.transitions is not None and not callable(self.transitions):
            raise ValueError(f"`transitions` of a prior must be a function n -> Transitions, got {self.transitions!r}")

    @classmethod
    def of(cls, prior: Prior | Distribution | PriorFactory | str | None, env: VecEnv | None = None) -> Prior:
        """What the argument ``prior`` of the algorithm means: a bare distribution is one over phi; a function that makes a prior,
        or its dotted name, is called with the environments."""
        if isinstance(prior, str):
            prior = _named(prior)
        if prior is None or isinstance(prior, Prior):
            return prior or cls()
        if isinstance(prior, Distribution):
            return cls(phi=prior)
        if callable(prior) and not isinstance(prior, type):
            if env is None:
                raise ValueError("`prior` is a function of the environment: give an environment, too")
            made = prior(env)
            if isinstance(made, (Prior, Distribution)):
                return cls.of(made)
            raise ValueError(f"`prior` must make a Prior or a distribution over phi, it made {made!r}")
        raise ValueError(f"`prior` must be a Prior, a distribution over phi or a function that makes one, got {prior!r}")

    @property
    def is_empty(self) -> bool:
        return all(getattr(self, field.name) is None for field in fields(self))


#: makes a prior, or a distribution over phi, for given environments
PriorFactory = Callable[[VecEnv], "Prior | Distribution"]


def _named(name: str) -> PriorFactory:
    """The function with a dotted name."""
    module, _, function = name.rpartition(".")
    try:
        return getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"`prior` must name a function as package.module.function, got {name!r}: {error}") from error


def check_phi_prior(prior: Distribution, phi_dim: int) -> None:
    """Refuse what is not a distribution over ``phi_dim`` coordinates."""
    if not isinstance(prior, Distribution):
        raise ValueError(f"The prior over phi must be a distribution, got {prior!r}")
    if tuple(prior.batch_shape) or tuple(prior.event_shape) != (phi_dim,):
        shape = f"batch shape {tuple(prior.batch_shape)} and event shape {tuple(prior.event_shape)}"
        raise ValueError(
            f"The prior over phi must have no batch shape and event shape ({phi_dim},) (`phi_dim` of the policy), got {shape}; "
            "torch.distributions.Independent(..., 1) makes one event of many coordinates"
        )
    state = th.get_rng_state()  # looking must not change what is drawn afterwards
    sample = prior.sample(th.Size((2,)))
    th.set_rng_state(state)
    if not (th.isfinite(sample).all() and th.isfinite(prior.log_prob(sample)).all()):
        raise ValueError("The prior over phi gives samples or densities that are not finite")
