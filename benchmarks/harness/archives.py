"""Many records in one file, a third as large as so many files: what episodes have in common is written once.

A file is a series of NumPy's arrays, one after the other as ``numpy.save`` writes them, compressed by xz as a whole. The first is
a text in JSON that says what there is, so that whoever looks for a record need not read more. The others are tables. Arrays that
have an entry for each episode are the columns of a table, and records that have the same ones share it. Each different row of it
is written once, column by column; then follows which of them stands in which place.
"""

from __future__ import annotations

import io
import json
import lzma
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np

from benchmarks.harness.records import Record, compact, smallest, write_atomically

__all__ = ["ARCHIVE", "read", "read_keys", "write"]

ARCHIVE = ".npy.xz"
STEP = "_step"  # the end of the names of arrays that rise: their differences are written, which are few
Names = tuple[str, ...]


# ---------------------------------------------------------------------- writing


def write(path: Path, records: Mapping[str, Record]) -> None:
    """Write records by their keys, so that whoever looks finds all of them, or what was there before."""
    tables: dict[Names, list[list[np.ndarray]]] = {}
    entries = []
    for key, record in sorted(records.items()):
        arrays = {name: compact(array) for name, array in record.arrays.items()}
        shapes = {names: arrays[names[0]].shape for names in _groups(arrays)}
        for names in shapes:
            tables.setdefault(names, []).append([_flat(name, arrays[name]) for name in names])
        numbers = list(tables)
        entries.append({"key": key, "meta": record.meta, "tables": [[numbers.index(names), shapes[names]] for names in shapes]})
    index = json.dumps({"tables": list(tables), "records": entries}, default=str)
    buffer = io.BytesIO()
    for array in (np.frombuffer(index.encode(), np.uint8), *_encoded(tables.values())):
        np.lib.format.write_array(buffer, array, allow_pickle=False)
    write_atomically(path, lzma.compress(buffer.getvalue(), preset=6 | lzma.PRESET_EXTREME))


def _groups(arrays: Mapping[str, np.ndarray]) -> list[Names]:
    """The names of arrays that are columns of one table: all of a stage that have the same shape, but for the steps."""
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for name, array in arrays.items():
        groups[name if name.endswith(STEP) else name.partition("_")[0], array.shape].append(name)
    return [tuple(names) for names in groups.values()]


def _flat(name: str, array: np.ndarray) -> np.ndarray:
    """The entries of an array as a column has them."""
    column = array.astype(np.float64).ravel()
    return np.diff(column, prepend=0.0) if name.endswith(STEP) else column


def _encoded(tables: Iterable[Sequence[Sequence[np.ndarray]]]) -> Iterator[np.ndarray]:
    """The different rows of each table, column by column, and the number of the row in each place."""
    for parts in tables:
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        first, numbers = _different_rows(columns)
        yield from (smallest(column[first]) for column in columns)
        yield numbers.astype(np.min_scalar_type(len(first)))


def _different_rows(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Where each different row is for the first time, and the number of the row in each place."""
    first, numbers = np.arange(0), np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, which = np.unique(column, return_inverse=True)
        _, first, numbers = np.unique(numbers * len(values) + which, return_index=True, return_inverse=True)
    return first, numbers


# ---------------------------------------------------------------------- reading


def read(path: Path) -> dict[str, Record]:
    """All records by their keys; a file that is damaged is a ``ValueError``."""
    try:
        with lzma.open(path) as file:
            index = _index(file)
            tables = [_Table(names, file) for names in index["tables"]]
            file.read()  # the end, where it turns out whether all is as it was written
            return {entry["key"]: Record(entry["meta"], _arrays(entry["tables"], tables)) for entry in index["records"]}
    except (lzma.LZMAError, EOFError, ValueError) as error:
        raise _damaged(path) from error


def read_keys(path: Path) -> list[str]:
    """The keys of all records, which takes much less time and memory than the records."""
    try:
        with lzma.open(path) as file:
            return [entry["key"] for entry in _index(file)["records"]]
    except (lzma.LZMAError, EOFError, ValueError) as error:
        raise _damaged(path) from error


def _damaged(path: Path) -> ValueError:
    return ValueError(f"{path} is damaged: take it from git again, or delete it to have all of its jobs run anew")


def _index(file: IO[bytes]) -> dict[str, Any]:
    return json.loads(np.lib.format.read_array(file, allow_pickle=False).tobytes())


class _Table:
    """A table that is read from the top, record by record.

    :param names: of the columns
    :param file: where they come next
    """

    def __init__(self, names: Sequence[str], file: IO[bytes]) -> None:
        self.rows = {name: np.lib.format.read_array(file, allow_pickle=False) for name in names}
        self.numbers = np.lib.format.read_array(file, allow_pickle=False)
        self.position = 0

    def next(self, shape: Sequence[int]) -> dict[str, np.ndarray]:
        """The arrays of the next record."""
        start, self.position = self.position, self.position + prod(shape)
        numbers = self.numbers[start : self.position]
        columns = {name: rows[numbers] for name, rows in self.rows.items()}
        flat = {name: np.cumsum(column) if name.endswith(STEP) else column for name, column in columns.items()}
        return {name: compact(column.reshape(shape)) for name, column in flat.items()}


def _arrays(shapes: Iterable[tuple[int, Sequence[int]]], tables: Sequence[_Table]) -> dict[str, np.ndarray]:
    return {name: array for number, shape in shapes for name, array in tables[number].next(shape).items()}
