"""Arguments that cannot be, refused at once."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["check", "check_count", "check_number"]


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse what is not an integer of at least ``least``."""
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    check(is_integer and value >= least, f"`{name}` must be an integer of at least {least}, got {value!r}")


def check_number(name: str, value: Any, low: float, high: float = np.inf) -> None:
    """Refuse what is not a number between two bounds, these included."""
    is_number = isinstance(value, (int, float, np.number))
    bounds = f"be at least {low}" if high == np.inf else f"lie between {low} and {high}"
    check(is_number and bool(low <= value <= high), f"`{name}` must {bounds}, got {value!r}")
