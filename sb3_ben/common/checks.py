"""What cannot be, refused at once and with a remedy: arguments, spaces, numbers that are not finite, files."""

from __future__ import annotations

import io
import pathlib
import zipfile
from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium import spaces

__all__ = ["check", "check_choice", "check_count", "check_finite", "check_model_file", "check_number", "check_spaces"]


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Refuse what is not among the names that an option goes by."""
    check(value in choices, f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse what is not an integer of at least ``least``."""
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    check(is_integer and value >= least, f"`{name}` must be an integer of at least {least}, got {value!r}")


def check_number(name: str, value: Any, low: float, high: float = np.inf) -> None:
    """Refuse what is not a number between two bounds, these included."""
    is_number = isinstance(value, (int, float, np.number))
    bounds = f"be at least {low}" if high == np.inf else f"lie between {low} and {high}"
    check(is_number and bool(low <= value <= high), f"`{name}` must {bounds}, got {value!r}")


def check_spaces(observation_space: spaces.Space, action_space: spaces.Space) -> None:
    """Say at once, and with a remedy, which spaces are not supported; errors of the same types as SB3's."""
    parts = observation_space.spaces.values() if isinstance(observation_space, spaces.Dict) else ()
    if any(isinstance(part, (spaces.Dict, spaces.Tuple)) for part in parts):
        raise NotImplementedError(
            "Nested observation spaces are not supported: flatten them, with gymnasium.wrappers.FlattenObservation or a "
            "TransformObservation of your own"
        )
    assert isinstance(action_space, spaces.Discrete), (
        f"BEN values each of finitely many actions, and the action space is {action_space}: make it Discrete, with a "
        "gymnasium.ActionWrapper that looks actions up in a table, or use an algorithm for such actions, for example RecurrentPPO"
    )


def check_finite(values: Any, what: str) -> None:
    """Refuse what an environment must not return.

    :param values: an array, or a dictionary of arrays
    :param what: its name
    """
    for part in values.values() if isinstance(values, dict) else (values,):
        if not np.isfinite(part).all():
            raise ValueError(f"The environment returned a {what} that is not finite: {np.asarray(part)}")


def check_model_file(path: str | pathlib.Path | io.BufferedIOBase) -> None:
    """Refuse what is not a zip file saved by BEN."""
    if isinstance(path, (str, pathlib.Path)):
        path = pathlib.Path(path)
        path = path if path.exists() else path.with_name(path.name + ".zip")
        if not path.exists():
            return  # SB3's own message names the file
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not a complete model file: it is damaged, cut short or something else")
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
            damaged = archive.testzip()
    except (zipfile.BadZipFile, NotImplementedError, EOFError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if hasattr(path, "seek"):
        path.seek(0)
    if damaged is not None:
        raise ValueError(f"{path} is damaged: its part {damaged} cannot be read")
    if not {"data", "policy.pth", "policy.posterior_optimizer.pth"} <= names:
        raise ValueError(f"{path} was not saved by BEN: load it with the algorithm that saved it")
