"""Splits that lie in shards: read by index, without holding more than what is asked for."""

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Self, TypeVar, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel
from upath import UPath

from app.config import ShardsConfig
from app.data.origins import Origins
from app.data.prepared import SHARDS_FILE, TRAIN, VALIDATION, Indices
from app.data.rows import RecordColumns, Row, RowColumns
from app.data.shard_cache import ShardCache
from app.data.shards import LENGTH, VALUE, Shard, ShardIndex
from app.errors import DataError, StorageError
from app.shared_files import read
from app.storage import is_local, to_path, write_atomically

_GROWN = "grown"
_MAX_WINDOW_ROWS = 2**20
"""Small samples: a window's rows are listed in memory."""
_ROWS_AT_ONCE = 1024
INPUT, TOKENS = "input", "tokens"
"""Columns of shards: ``INPUT`` for labelled examples, beside ``VALUE``; ``TOKENS`` for language modelling.

Rows of a table have ``NUMBERS`` and ``CATEGORIES`` in place of ``INPUT``, and records have columns for each field.
"""
InputColumns = RowColumns | RecordColumns | None
Item = TypeVar("Item")


class ShardReference(BaseModel):
    """Where a run's shards lie. A run keeps this file in place of the data."""

    location: str
    sha256: str
    """``ShardIndex.sha256`` when the run began."""
    config: ShardsConfig

    @classmethod
    def find(cls, folder: UPath) -> Self | None:
        """Return the reference in a folder of prepared data; None if the data lie in the folder itself.

        For a run that has added sources, the reference is in a subfolder.
        """
        found = read(folder / _GROWN / SHARDS_FILE) or read(folder / SHARDS_FILE)
        return None if found is None else cls.model_validate_json(found)

    @classmethod
    def of(cls, folder: UPath) -> Self:
        """Return the reference in a folder of prepared data. Raises DataError if there is none."""
        if (reference := cls.find(folder)) is None:
            raise DataError(f"{str(folder)!r} does not refer to shards: prepare the data again").of("shards.missing")
        return reference

    def save_grown(self, folder: UPath) -> None:
        """Replace the reference in a folder of prepared data. Its other files and their checksums do not change."""
        (folder / _GROWN).mkdir(exist_ok=True)
        self.save(folder / _GROWN)

    def require_within(self, grown: "ShardReference") -> None:
        """Raise DataError unless the first shards of each split of ``grown`` are these."""
        for split, shards in self.index.splits.items():
            after = grown.index.splits.get(split, [])
            if [shard.sha256 for shard in after[: len(shards)]] != [shard.sha256 for shard in shards]:
                raise DataError(
                    f"the {split} split of the sources that the run has is not what it was when it began: restore "
                    "their files, append new sources after them, or start a new run"
                ).of("source.changed", "data.sources")

    def save(self, folder: UPath) -> None:
        """Write the reference for ``find``."""
        write_atomically(folder / SHARDS_FILE, self.model_dump_json(indent=1).encode())

    @cached_property
    def index(self) -> ShardIndex:
        """The index of the shards. Raises StorageError if it is missing, or of other shards."""
        index = ShardIndex.load(to_path(self.location))
        if index.sha256 != self.sha256:
            raise StorageError(
                f"the shards in {self.location!r} are not those that the run began with: their sha256 is "
                f"{index.sha256[:12]}…, expected {self.sha256[:12]}…; start a new run"
            ).of("shards.changed")
        return index

    @property
    def origins(self) -> Origins | None:
        """The source of each row, if there are several."""
        train, validation = (self.index.splits.get(split, []) for split in (TRAIN, VALIDATION))
        is_mixed = any(shard.source for shard in [*train, *validation])
        return Origins.of_shards(train, validation) if is_mixed else None

    def open(self, split: str) -> "ShardedRows":
        """Return the rows of a split."""
        return self.open_shards(self.index.splits.get(split, []))

    def open_shards(self, shards: Sequence[Shard]) -> "ShardedRows":
        """Return the rows of shards in the same folder."""
        return ShardedRows(self.location, shards, self.config, self.index.columns)


class ShardedRows:
    """The rows of a split, numbered from 0 over its shards in the order of the index."""

    def __init__(
        self, location: str, shards: Sequence[Shard], config: ShardsConfig, columns: InputColumns = None
    ) -> None:
        """``columns``: of rows or records. Other inputs are a column of shards."""
        self.columns = columns
        self._cache = ShardCache(location, shards, config.cache)
        self._location, self._shards, self._config = location, shards, config
        self.shard_rows = [shard.rows for shard in shards]
        """Number of rows of each shard."""
        self.first_rows: NDArray[np.int64] = np.concatenate([[0], np.cumsum(self.shard_rows)]).astype(np.int64)
        """Index of the first row of each shard, and the number of all rows."""

    def __len__(self) -> int:
        return int(self.first_rows[-1])

    @cached_property
    def is_local(self) -> bool:
        """Whether they lie on this machine's disk."""
        return is_local(to_path(self._location))

    @cached_property
    def window_rows(self) -> int:
        """Number of rows of ``data.shards.window``."""
        rows = int(self._config.window * len(self) / max(1, sum(shard.bytes for shard in self._shards)))
        return min(rows, _MAX_WINDOW_ROWS)

    @cached_property
    def has_one_length(self) -> bool:
        """Whether all rows have the same length."""
        return len({length for shard in self._shards for length in (shard.min_length, shard.max_length)}) <= 1

    @cached_property
    def longest(self) -> int:
        """Index of a row with the greatest length."""
        number = max(range(len(self._shards)), key=lambda place: self._shards[place].max_length)
        return int(self.first_rows[number] + np.argmax(self.numbers_of(number, LENGTH)))

    def place(self, row: int) -> str:
        """Return the shard of a row and its number in it, for messages."""
        shard = int(self._places(np.array(row)))
        return f"{self._location}/{self._shards[shard].name}, row {1 + row - self.first_rows[shard]:,}"

    def numbers_of(self, shard: int, column: str) -> NDArray[np.int32]:
        """Return a column of numbers of a shard."""
        numbers: NDArray[np.int32] = self._cache.open(shard).rows.column(column).to_numpy()
        return numbers

    def lengths_at(self, rows: Indices) -> NDArray[np.int32]:
        """Return the length of each row. It is fast if rows of a shard follow one another."""
        return self.numbers_at(rows, LENGTH)

    def classes_at(self, rows: Indices) -> NDArray[np.int32]:
        """Return the class of each row, likewise."""
        return self.numbers_at(rows, VALUE)

    def total(self, column: str) -> int:
        """Return the sum of a column of counts over all rows. No shard is read."""
        return sum(shard.totals[column] for shard in self._shards)

    def numbers_at(self, rows: Indices, column: str) -> NDArray[np.int32]:
        """Return a column of numbers of each row, likewise."""
        numbers = [self.numbers_of(shard, column)[part] for shard, part in self._runs(rows)]
        return np.concatenate([np.empty(0, np.int32), *numbers])

    def _places(self, rows: Indices) -> Indices:
        """Return the index of the shard of each row."""
        return self.first_rows.searchsorted(rows, side="right") - 1

    def prefetch(self, rows: Indices) -> None:
        """Have the shards of these rows downloaded, or read from the disk, in the background."""
        self._cache.prefetch(np.unique(self._places(rows)).tolist())

    @cached_property
    def has_class_counts(self) -> bool:
        """Whether ``class_counts`` reads no shard."""
        return all(shard.class_rows is not None for shard in self._shards)

    def class_counts(self, num_classes: int) -> NDArray[np.int64]:
        """Return the number of rows of each class, of shape (num_classes,). Only shards without counts are read."""
        total = np.zeros(num_classes, np.int64)
        for place, shard in enumerate(self._shards):
            if shard.class_rows is None:
                total += np.bincount(self._cache.open(place).rows.column(VALUE).to_numpy(), minlength=num_classes)
            else:
                total[list(shard.class_rows)] += list(shard.class_rows.values())
        return total

    def column(self, name: str) -> Iterator[Any]:
        """Yield a column of all rows."""
        for start in range(0, len(self), _ROWS_AT_ONCE):
            rows = np.arange(start, min(start + _ROWS_AT_ONCE, len(self)))
            yield from self.read_arrays(rows, name)[0].tolist()

    def close(self) -> None:
        """Drop downloads that have not begun, so that a process need not wait for them when it ends."""
        self._cache.close()

    def read(self, indices: Sequence[int] | NDArray[np.int64]) -> pa.Table:
        """Return rows in the order of ``indices``.

        Raises:
            StorageError: a shard is missing, torn or was changed.
        """
        numbers = np.asarray(indices, np.int64)
        order, groups = self._by_shard(numbers)
        parts = [self._cache.open(shard).rows.take(pa.array(rows)) for shard, rows in groups]
        table = pa.Table.from_batches(parts)
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        return table if len(groups) == 1 and len(order) == 1 else table.combine_chunks().take(pa.array(inverse))

    def read_arrays(self, indices: Sequence[int] | NDArray[np.int64], *columns: str) -> list[NDArray[Any]]:
        """Return columns in the order of ``indices``, of shape (rows,), or (rows, size) if they are lists of one size.

        What is no number is an object of Python. Raises StorageError as ``read``.
        """
        numbers = np.asarray(indices, np.int64)
        places = self._places(numbers)
        if (places == places[0]).all():
            opened, rows = self._cache.open(int(places[0])), numbers - self.first_rows[places[0]]
            return [opened.take(name, rows) for name in columns]
        order, groups = self._by_shard(numbers)
        parts = [(self._cache.open(shard), rows) for shard, rows in groups]
        inverse = np.argsort(order)
        return [np.concatenate([shard.take(name, rows) for shard, rows in parts])[inverse] for name in columns]

    def _by_shard(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[tuple[int, NDArray[np.int64]]]]:
        """Return the order that sorts indices by row, and the rows of each shard in it."""
        order = np.argsort(indices, kind="stable")
        return order, list(self._runs(indices[order]))

    def _runs(self, rows: Indices) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield each run of rows of one shard: the shard's number, and the rows counted from its first one."""
        places = self._places(rows)
        starts = np.flatnonzero(np.diff(places, prepend=-1)).tolist()
        for start, end in pairwise([*starts, len(rows)]):
            shard = int(places[start])
            yield shard, rows[start:end] - self.first_rows[shard]


class _OfRows(Sequence[Item]):
    """Something of each row. Single rows are for pages, which look at a few."""

    def __init__(self, rows: ShardedRows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._at(index)

    @abstractmethod
    def _at(self, row: int) -> Item: ...


class ShardNumbers(Sequence[int]):
    """A number of each row. A shard is opened when one of its numbers is asked for."""

    def __init__(self, rows: ShardedRows, column: str) -> None:
        self._rows, self._column = rows, column

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return self._rows.column(self._column)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    @overload
    def __getitem__(self, index: Indices) -> NDArray[np.int32]: ...
    def __getitem__(self, index: int | slice | Indices) -> int | list[int] | NDArray[np.int32]:
        if isinstance(index, np.ndarray):
            return self._rows.numbers_at(index, self._column)
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return int(self[np.array([index])][0])


class ShardColumn(_OfRows[Item]):
    """One column of the rows."""

    def __init__(self, rows: ShardedRows, column: str, read: Callable[[Any], Item] = lambda value: value) -> None:
        """``read`` turns a cell into an item."""
        super().__init__(rows)
        self._column, self._read = column, read

    def __iter__(self) -> Iterator[Item]:
        return map(self._read, self._rows.column(self._column))

    def _at(self, row: int) -> Item:
        return self._read(self._rows.read([row])[self._column][0].as_py())


class _ColumnInputs(_OfRows[Row]):
    """The rows of a table, or records."""

    def __init__(self, split: "ShardedSplit") -> None:
        super().__init__(split.shards)
        self._take = split.take

    def __iter__(self) -> Iterator[Row]:
        for first, stop in pairwise(self._rows.first_rows.tolist()):
            yield from self._take(range(first, stop))[0]

    def _at(self, row: int) -> Row:
        return next(iter(self._take([row])[0]))


class ShardedSplit:
    """Labelled examples in shards."""

    def __init__(self, shards: ShardedRows) -> None:
        self.shards, self._columns = shards, shards.columns

    def __len__(self) -> int:
        return len(self.shards)

    @property
    def inputs(self) -> Sequence[Any]:
        """The input of each row."""
        return ShardColumn(self.shards, INPUT) if self._columns is None else _ColumnInputs(self)

    @property
    def classes(self) -> Sequence[Any]:
        """What the label of each row means: a class, an index into the labels; or another value of the targets."""
        return ShardColumn(self.shards, VALUE, self._read_value)

    @property
    def lengths(self) -> Sequence[int]:
        """The number of characters of each text; 0 for pictures."""
        return ShardNumbers(self.shards, LENGTH)

    def class_counts(self, num_classes: int) -> NDArray[np.int64]:
        """Return the number of rows of each class, of shape (num_classes,)."""
        return self.shards.class_counts(num_classes)

    def take(self, indices: Sequence[int]) -> tuple[Sequence[Any], list[Any]]:
        """Return inputs and values in the order of ``indices``."""
        names = [INPUT] if self._columns is None else self._columns.kept
        *found, values = self.shards.read_arrays(indices, *names, VALUE)
        cells = dict(zip(names, found, strict=True))
        inputs = cells[INPUT].tolist() if self._columns is None else self._columns.open(cells)
        return inputs, self._read_values(values)

    def values(self, indices: Sequence[int]) -> list[Any]:
        """Return values in the order of ``indices``. No input is read."""
        return self._read_values(self.shards.read_arrays(indices, VALUE)[0])

    def _read_values(self, values: NDArray[Any]) -> list[Any]:
        return [self._read_value(value) for value in values] if values.dtype == object else values.tolist()

    @staticmethod
    def _read_value(value: Any) -> Any:
        """Return a value as the targets read it: those of a task of one's own are kept as JSON."""
        return json.loads(value) if isinstance(value, str) else value
