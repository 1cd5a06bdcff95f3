"""What the benchmarks share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

HYPERPARAMS = Path(__file__).resolve().parent.parent / "hyperparams"


def tuned(algorithm: str, env_id: str) -> dict[str, Any]:
    """The hyperparameters of an algorithm for an environment, as rl-zoo3 reads them, ready for the constructor and ``n_envs``.

    :param algorithm: name of a file in ``hyperparams/``
    :param env_id: an entry of it; ``default`` where it has none
    """
    entries = yaml.safe_load((HYPERPARAMS / f"{algorithm}.yml").read_text())
    settings = dict(entries.get(env_id, entries["default"]))
    settings.pop("n_timesteps", None)
    settings.setdefault("n_envs", 1)
    if isinstance(settings.get("policy_kwargs"), str):
        settings["policy_kwargs"] = eval(settings["policy_kwargs"])  # as the zoo does
    return settings
