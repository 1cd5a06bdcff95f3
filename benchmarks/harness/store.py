"""Where the records of jobs are: each in a file of its own at first, then all of an experiment in one.

A job writes ``EXPERIMENT/ENVIRONMENT/AGENT/SEED-FINGERPRINT.npz.xz`` into the folder of results, complete or not at all, and
:func:`fold` moves such files into ``EXPERIMENT.npy.xz``. In both, the key of a record is the path without the ending. Those who
write have the folder to themselves, one after the other; those who read need not wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import glob
import lzma
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import archives, records
from benchmarks.harness.archives import ARCHIVE
from benchmarks.harness.experiment import Job, load_all
from benchmarks.harness.records import SUFFIX, Record

LOCK = ".lock"  # a file in the folder of results

# ---------------------------------------------------------------------- names


def key_of(job: Job) -> str:
    """The key of a job's record. It ends with the fingerprint of the configuration, by which others find it."""
    return f"{job.name}-{job.digest()}"


def job_name(key: str) -> str:
    """The name of the job in a key."""
    return key.rpartition("-")[0]


def fingerprint(key: str) -> str:
    """The fingerprint in a key."""
    return key.rpartition("-")[2]


def path_of(job: Job, results: Path) -> Path:
    """The file that a job writes."""
    return _path(key_of(job), results)


def archive_of(name: str, results: Path) -> Path:
    """The file of the experiment that a key, or the name of a job, begins with."""
    return results / f"{name.partition('/')[0]}{ARCHIVE}"


def _path(key: str, results: Path) -> Path:
    return results / f"{key}{SUFFIX}"


# ---------------------------------------------------------------------- reading


def find(job: Job, results: Path) -> Record | None:
    """The record of a job: its own, or that of another experiment's job with the very same configuration."""
    record = _single(job, results)  # first: it may be moved in the meantime
    place = _place(job, results) if record is None else None
    return record if place is None else _read(place.archive, _version(place.archive)).get(place.key)


def has(job: Job, results: Path) -> bool:
    """Whether there is a record of a job, which takes less time and memory than to read it."""
    return _single(job, results) is not None or _place(job, results) is not None


def is_done(job: Job, results: Path) -> bool:
    """Whether there is a record of a job's own, at a glance."""
    return path_of(job, results).exists() or key_of(job) in keys_in(archive_of(job.name, results))


def keys(results: Path) -> list[str]:
    """The keys of all records."""
    return sorted({*_singles(results), *(key for archive in _archives(results) for key in keys_in(archive))})


def keys_in(archive: Path) -> list[str]:
    """The keys in the file of an experiment, which need not exist."""
    return [key for found in _by_fingerprint(archive, _version(archive)).values() for key in found]


def outdated(job: Job, results: Path) -> list[str]:
    """The keys of a job's records with other settings, but for those that other jobs find by the fingerprint."""
    own = key_of(job)
    return sorted(key for key in {*_singles(results), *keys_in(archive_of(own, results))} if _is_replaced(key, own))


class _Place(NamedTuple):
    """A record in the file of an experiment."""

    archive: Path
    key: str


def _place(job: Job, results: Path) -> _Place | None:
    """Where the record of a job is among many, if possible under its own key."""
    own = key_of(job)
    for archive in (archive_of(own, results), *_archives(results)):
        found = _by_fingerprint(archive, _version(archive)).get(fingerprint(own))
        if found:
            return _Place(archive, own if own in found else found[0])
    return None


def _single(job: Job, results: Path) -> Record | None:
    """The record of a job in a file of its own. One that is damaged counts as missing."""
    own = key_of(job)
    for key in (own, *_singles(results, fingerprint(own))):
        if (record := _intact(_path(key, results))) is not None:
            return record
    return None


def _singles(results: Path, digest: str = "*") -> list[str]:
    """The keys of records in files of their own; folders that vanish meanwhile do not matter to this way of looking."""
    found = glob.glob(f"**/*-{digest}{SUFFIX}", root_dir=results, recursive=True)
    return sorted(Path(path).as_posix().removesuffix(SUFFIX) for path in found)


def _intact(path: Path) -> Record | None:
    with contextlib.suppress(FileNotFoundError, lzma.LZMAError, EOFError, ValueError):
        return records.read(path)
    return None


def _archives(results: Path) -> list[Path]:
    return sorted(results.glob(f"*{ARCHIVE}"))


Version = tuple[int, ...]


def _version(path: Path) -> Version:
    """What tells a file from another one that takes its place; nothing where there is none."""
    with contextlib.suppress(FileNotFoundError):
        stat = path.stat()
        return stat.st_ino, stat.st_mtime_ns, stat.st_size
    return ()


@functools.lru_cache(maxsize=64)
def _by_fingerprint(archive: Path, version: Version) -> dict[str, list[str]]:
    """The keys in a version of a file by their fingerprints."""
    found: dict[str, list[str]] = defaultdict(list)
    for key in archives.read_keys(archive) if version else ():
        found[fingerprint(key)].append(key)
    return dict(found)


@functools.lru_cache(maxsize=64)
def _read(archive: Path, version: Version) -> dict[str, Record]:
    """The records in a version of a file by their keys."""
    return archives.read(archive) if version else {}


# ---------------------------------------------------------------------- writing


@contextlib.contextmanager
def locked(results: Path) -> Iterator[None]:
    """Have the folder of results for this process alone; wait for it as long as it takes."""
    results.mkdir(parents=True, exist_ok=True)
    with (results / LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def keep(record: Record, job: Job, results: Path) -> None:
    """Write the record of a job."""
    with locked(results):  # or the folder may be removed because it is empty
        records.write(path_of(job, results), record)


def fold(results: Path) -> None:
    """Move all records that have files of their own into those of their experiments. There they take the place of records of the
    same jobs with other settings; what belongs to agents and environments that the experiment no longer has is dropped."""
    with locked(results):
        singles: dict[Path, list[str]] = defaultdict(list)
        for key in sorted(_singles(results), key=lambda key: _path(key, results).stat().st_mtime_ns):
            singles[archive_of(key, results)].append(key)
        for archive in sorted({*singles, *_archives(results)}):
            _fold(archive, singles[archive], results)


def _fold(archive: Path, singles: Sequence[str], results: Path) -> None:
    """Move records, the oldest first, into one file; those that are damaged stay where they are."""
    new = {key: record for key in singles if (record := _intact(_path(key, results))) is not None}
    if not new and all(map(_is_declared, keys_in(archive))):
        return
    found = dict(_read(archive, _version(archive)))
    for key, record in new.items():
        found = {other: old for other, old in found.items() if not _is_replaced(other, key)} | {key: record}
    _write(archive, {key: record for key, record in found.items() if _is_declared(key)})
    for key in new:
        _remove(_path(key, results), results)


def forget(jobs: Sequence[Job], results: Path) -> int:
    """Remove the records of jobs, so that they are run again; return how many these were."""
    digests = {job.digest() for job in jobs}
    with locked(results):
        known = [key for key in keys(results) if fingerprint(key) in digests]
        for archive in {archive_of(key, results) for key in known}:
            found = _read(archive, _version(archive))
            _write(archive, {key: record for key, record in found.items() if key not in known})
        for key in known:
            _remove(_path(key, results), results)
    return len(known)


def _write(archive: Path, found: Mapping[str, Record]) -> None:
    if found:
        archives.write(archive, found)
    else:
        archive.unlink(missing_ok=True)


def _remove(path: Path, results: Path) -> None:
    """Remove a file, and the folders that it was in as far as there is nothing else in them."""
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        while (path := path.parent) != results:
            path.rmdir()


# ---------------------------------------------------------------------- what is needed


def _is_replaced(key: str, new: str) -> bool:
    """Whether a record is of no use any more once there is a new one."""
    return key != new and job_name(key) == job_name(new) and fingerprint(key) not in _needed()


def _is_declared(key: str) -> bool:
    """Whether an experiment has the environment and the agent of a record, or a job needs it that differs in its labels. Of
    experiments that are not known, all is left as it is."""
    of_agent = job_name(key).rpartition("/")[0]
    experiments = {name.partition("/")[0] for name in _agents()}
    return key.partition("/")[0] not in experiments or of_agent in _agents() or fingerprint(key) in _needed()


@functools.cache
def _needed() -> set[str]:
    """The fingerprints of all jobs that are declared."""
    return {job.digest() for experiment in load_all().values() for job in experiment.jobs()}


@functools.cache
def _agents() -> set[str]:
    """All agents in all environments, as the names of their jobs begin."""
    return {job.name.rpartition("/")[0] for experiment in load_all().values() for job in experiment.jobs()}
