"""Agents that know the problem: the scale on which learners are scored, and rows of the same tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sb3_ben.callbacks import exact_return
from sb3_ben.envs import ENVIRONMENTS
from sb3_ben.envs.bandit import BanditConfig
from sb3_ben.envs.search_and_rescue import SearchAndRescueConfig
from sb3_ben.envs.tiger import TigerConfig
from sb3_ben.envs.world import WorldConfig
from sb3_ben.oracles import bandit, memoryless, search_and_rescue, tiger

DRAWS = 7  # seed of those that draw

#: by world: name -> how it is made from the arguments of the environment
REFERENCES: dict[type[WorldConfig], dict[str, Callable[[Any], Any]]] = {
    TigerConfig: {
        "Bayes-optimal": tiger.BayesOptimal,
        "arg-max QMDP": tiger.ArgMaxQMDP,
        "posterior sampling": lambda config: tiger.PosteriorSampling(config, seed=DRAWS),
        "best without memory": memoryless.BestMemorylessTiger,
        "always listens": tiger.AlwaysListen,
    },
    SearchAndRescueConfig: {
        "exact belief": search_and_rescue.BeliefAgent,
        "never opens": search_and_rescue.NeverOpens,
        "random": lambda config: search_and_rescue.RandomAgent(config, seed=DRAWS),
    },
    BanditConfig: {
        "Bayes-optimal": bandit.BayesOptimal,
        "Gittins": bandit.Gittins,
        "greedy": bandit.Greedy,
        "best without memory": memoryless.BestMemorylessBandit,
        "Thompson": lambda config: bandit.Thompson(config, seed=DRAWS),
        "random": lambda config: bandit.RandomArm(config, seed=DRAWS),
    },
}
#: by world: who scores 0 and who scores 1
SCALE: dict[type[WorldConfig], tuple[str, str]] = {
    TigerConfig: ("always listens", "Bayes-optimal"),
    SearchAndRescueConfig: ("never opens", "exact belief"),
    BanditConfig: ("random", "Bayes-optimal"),
}
#: environments of others, where no references are known: the returns that score 0 and 1
BOUNDS = {"CartPole-v1": (0.0, 500.0), "CartPoleNoVel-v1": (0.0, 500.0)}


class World(NamedTuple):
    """What is known of an environment.

    :param zero: the reference that scores 0
    :param one: the reference that scores 1
    :param exact: the expected return of the latter, where it can be computed
    :param bounds: the returns that score 0 and 1, where there are no references
    """

    zero: str = ""
    one: str = ""
    exact: float | None = None
    bounds: tuple[float, float] | None = None


def config_of(env_id: str, kwargs: dict[str, Any]) -> WorldConfig:
    """The arguments of one of our environments."""
    from importlib import import_module

    module, world, defaults = ENVIRONMENTS[env_id]
    config_class = getattr(import_module(f"sb3_ben.envs.{module}"), world).config_class
    return config_class.from_kwargs(**{**defaults, **kwargs})


def make_reference(name: str, config: WorldConfig) -> Any:
    """An agent with SB3's ``predict``."""
    known = REFERENCES[type(config)]
    if name not in known:
        raise ValueError(f"{type(config).__name__} has no reference {name!r}, only {', '.join(known)}")
    return known[name](config)


def world(env_id: str, kwargs: dict[str, Any]) -> World:
    """What is known of an environment."""
    if env_id in BOUNDS:
        return World(bounds=BOUNDS[env_id])
    config = config_of(env_id, kwargs)
    return World(*SCALE[type(config)], exact_return(config))


def has_reference(name: str, env_id: str) -> bool:
    """Whether a reference knows the problem."""
    return env_id in ENVIRONMENTS and name in REFERENCES[type(config_of(env_id, {}))]
