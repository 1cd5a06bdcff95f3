"""What the benchmarks share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from stable_baselines3.common.utils import LinearSchedule
from torch import nn

from sb3_ben.envs.extractors import RescueExtractor

HYPERPARAMS = Path(__file__).resolve().parent.parent / "hyperparams"


def _entry(algorithm: str, env_id: str) -> dict[str, Any]:
    entries = yaml.safe_load((HYPERPARAMS / f"{algorithm}.yml").read_text())
    return dict(entries.get(env_id, entries["default"]))


def tuned_steps(algorithm: str, env_id: str) -> int:
    """The number of environment steps that the hyperparameters are meant for."""
    return int(_entry(algorithm, env_id)["n_timesteps"])


def tuned(algorithm: str, env_id: str) -> dict[str, Any]:
    """The hyperparameters of an algorithm for an environment, as rl-zoo3 reads them, ready for the constructor and ``n_envs``.

    :param algorithm: name of a file in ``hyperparams/``
    :param env_id: an entry of it; ``default`` where it has none
    """
    settings = _entry(algorithm, env_id)
    settings.pop("n_timesteps", None)
    settings.setdefault("n_envs", 1)
    for name, value in settings.items():
        if isinstance(value, str) and value.startswith("lin_"):
            settings[name] = LinearSchedule(float(value.removeprefix("lin_")), 0.0, 1.0)
        elif isinstance(value, str) and value.startswith("dict("):
            settings[name] = eval(value, {"nn": nn, "RescueExtractor": RescueExtractor})  # as the zoo does
    return settings
