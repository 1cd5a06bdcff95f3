"""The raw results of a job, and the small compressed file that they are in as long as others of the experiment are at work."""

from __future__ import annotations

import contextlib
import io
import json
import lzma
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("sb3_ben", "stable_baselines3", "sb3_contrib", "rl_zoo3", "gymnasium", "torch", "zuko", "numpy")
SUFFIX = ".npz.xz"


@dataclass
class Record:
    """What a job has found.

    :param meta: configuration, times, versions
    :param arrays: raw numbers. ``train_step`` and ``train_NAME`` have a row for each episode of training, ``curve_step`` and
        ``curve_return`` one for each evaluation on the way (and a column for each episode), ``eval_NAME`` one for each episode of
        the last evaluation; ``metric_NAME`` is what else was measured
    """

    meta: dict[str, Any]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def statistics(self) -> list[str]:
        """What the environment counts beside the return."""
        names = [name.removeprefix("eval_") for name in self.arrays if name.startswith("eval_")]
        return [name for name in names if name != "return"]


def compact(array: np.ndarray) -> np.ndarray:
    """The array in the smallest type that holds it; numbers that are not whole keep seven digits."""
    array = np.asarray(array)
    if array.size == 0 or not np.isfinite(array).all() or (array != np.round(array)).any():
        return array.astype(np.float32)
    return smallest(array, (np.int8, np.int16, np.int32))


def smallest(array: np.ndarray, dtypes: Sequence[type[np.number]] = (np.int8, np.int16, np.int32, np.float32)) -> np.ndarray:
    """The array in the first of some types that holds it exactly, or in double precision."""
    for dtype in dtypes:
        with np.errstate(invalid="ignore", over="ignore"):
            smaller = array.astype(dtype)
        if np.array_equal(smaller.astype(np.float64), array.astype(np.float64), equal_nan=True):
            return smaller
    return array.astype(np.float64)


def write(path: Path, record: Record) -> None:
    """Write a record, so that whoever looks finds all of it or nothing, even if this process is killed."""
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {name: compact(array) for name, array in record.arrays.items()}
    np.savez(buffer, meta=np.array(json.dumps(record.meta, default=str)), **arrays)
    write_atomically(path, lzma.compress(buffer.getvalue(), preset=6))  # a third smaller than numpy's own compression


def write_atomically(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def read(path: Path) -> Record:
    """Read a record."""
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as file:
        return Record(json.loads(str(file["meta"])), {name: file[name] for name in file.files if name != "meta"})


def provenance() -> dict[str, Any]:
    """What the numbers were made with."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {"versions": versions, "machine": f"{platform.system()} {platform.machine()}"}


def commit() -> str:
    """The commit of this repository, with a plus where files other than results have been changed since."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "-uno", "--", ":/", ":(top,exclude)benchmarks/results")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
