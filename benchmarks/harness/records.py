"""The raw results of a job: one small compressed file each, written at once or not at all."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import lzma
import os
import platform
import subprocess
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.experiment import Job, load_all

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
    for dtype in (np.int8, np.int16, np.int32):
        if np.iinfo(dtype).min <= array.min() and array.max() <= np.iinfo(dtype).max:
            return array.astype(dtype)
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


def path_of(job: Job, results: Path) -> Path:
    """Where the record of a job is kept. Its name ends with the fingerprint of the configuration, by which others find it."""
    return results / f"{job.name}-{job.digest()}{SUFFIX}"


def find(job: Job, results: Path) -> Record | None:
    """The record of a job: its own, or that of another experiment's job with the very same configuration."""
    own = path_of(job, results)
    for path in (own, *sorted(results.glob(f"**/*-{job.digest()}{SUFFIX}"))):
        with contextlib.suppress(FileNotFoundError, lzma.LZMAError, ValueError):
            return read(path)
    return None


def outdated(job: Job, results: Path) -> list[Path]:
    """Records of the job with other settings than it has now, but for those that other experiments find by the fingerprint."""
    own = path_of(job, results)
    others = [path for path in own.parent.glob(f"{job.seed_name}-*{SUFFIX}") if path != own]
    return [path for path in others if fingerprint(path) not in _needed()]


def fingerprint(path: Path) -> str:
    """The fingerprint in the name of a record."""
    return path.name.removesuffix(SUFFIX).rpartition("-")[2]


@functools.cache
def _needed() -> set[str]:
    """The fingerprints of all jobs that are declared."""
    return {job.digest() for experiment in load_all().values() for job in experiment.jobs()}


def provenance() -> dict[str, Any]:
    """What the numbers were made with."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {"versions": versions, "machine": f"{platform.system()} {platform.machine()}"}


def commit() -> str:
    """The commit of this repository, with a plus where files have been changed since."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
