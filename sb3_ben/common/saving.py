"""Files that are complete or not there at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["complete_file"]


@contextmanager
def complete_file(path: Any, suffix: str) -> Iterator[Any]:
    """Where to write what is to stand under a path: a file beside it, which takes its place once it is written.

    A run that is killed while it saves keeps what it had saved before. What is not a path (an open file) is left to the caller.

    :param path: the path, or something else to write to
    :param suffix: appended, as SB3 does, where the path has none
    """
    if not isinstance(path, (str, Path)):
        yield path
        return
    final = Path(path) if Path(path).suffix else Path(f"{path}.{suffix}")
    unfinished = final.with_name(f"{final.name}.unfinished")
    try:
        yield unfinished
        os.replace(unfinished, final)
    finally:
        unfinished.unlink(missing_ok=True)
