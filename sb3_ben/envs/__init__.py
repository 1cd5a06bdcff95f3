"""The environments of the paper and their registration with Gymnasium.

Only registration happens on import: the classes are loaded when an environment is made.
"""

from __future__ import annotations

from typing import Any

from gymnasium.envs.registration import register, registry

__all__ = ["ENVIRONMENTS", "register_envs"]

#: id -> (module, world, keyword arguments)
ENVIRONMENTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Tiger-v0": ("tiger", "Tiger", {}),
    "SearchAndRescue-v0": ("search_and_rescue", "SearchAndRescue", {}),
    "SearchAndRescue5x5-v0": ("search_and_rescue", "SearchAndRescue", {"grid_size": 5, "n_victims": 3, "n_hazards": 5}),
    "BernoulliBandit-v0": ("bandit", "BernoulliBandit", {}),
}


def register_envs() -> None:
    """Register the environments with Gymnasium; calling it again does nothing.

    The time limit is an argument of each environment (``horizon``), so none is registered.
    """
    for env_id, (module, world, kwargs) in ENVIRONMENTS.items():
        if env_id not in registry:
            entry_point = f"sb3_ben.envs.{module}:{world}"
            register(env_id, f"{entry_point}Env", vector_entry_point=f"{entry_point}VectorEnv", kwargs=kwargs)
