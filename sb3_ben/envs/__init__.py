"""The environments of the paper and their registration with Gymnasium.

Only registration happens on import: the classes are loaded when an environment is made.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gymnasium.envs.registration import register, registry

if TYPE_CHECKING:
    from sb3_ben.envs.views import WorldVecEnv

__all__ = ["ENVIRONMENTS", "make_vec", "register_envs"]

#: id -> (module, world, keyword arguments)
ENVIRONMENTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Tiger-v0": ("tiger", "Tiger", {}),
    "SearchAndRescue-v0": ("search_and_rescue", "SearchAndRescue", {}),
    "SearchAndRescue5x5-v0": ("search_and_rescue", "SearchAndRescue", {"grid_size": 5, "n_victims": 3, "n_hazards": 5}),
    "BernoulliBandit-v0": ("bandit", "BernoulliBandit", {}),
    "DeepSea-v0": ("deep_sea", "DeepSea", {}),
    "DeepSea20-v0": ("deep_sea", "DeepSea", {"size": 20}),
}


def register_envs() -> None:
    """Register the environments with Gymnasium; calling it again does nothing.

    The time limit is an argument of each environment (``horizon``), so none is registered.
    """
    for env_id, (module, world, kwargs) in ENVIRONMENTS.items():
        if env_id not in registry:
            entry_point = f"sb3_ben.envs.{module}:{world}"
            register(env_id, f"{entry_point}Env", vector_entry_point=f"{entry_point}VectorEnv", kwargs=kwargs)


def make_vec(env_id: str, n_envs: int = 1, seed: int | None = None, **kwargs: Any) -> WorldVecEnv:
    """Make the fast SB3 ``VecEnv`` of one of our environments: all episodes in array operations.

    :param env_id: one of :data:`ENVIRONMENTS`
    :param n_envs: number of parallel episodes
    :param seed: slot ``i`` plays the episodes of a single environment seeded with ``seed + i``
    :param kwargs: the environment's arguments, and ``render_mode``
    """
    env_id = env_id.removeprefix("sb3_ben:")
    if env_id not in ENVIRONMENTS:
        raise ValueError(f"`env_id` must be one of {', '.join(ENVIRONMENTS)}, got {env_id!r}")
    module, world, defaults = ENVIRONMENTS[env_id]
    vec_env_class = getattr(import_module(f"sb3_ben.envs.{module}"), f"{world}VecEnv")
    return vec_env_class(n_envs, seed=seed, **{**defaults, **kwargs})
