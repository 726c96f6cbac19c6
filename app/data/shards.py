"""Shards: Arrow files of bounded size in a folder, with an index that has their rows and checksums.

A folder is complete when it has its index, which is written last.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from upath import UPath

from app.checksums import sha256_of, sha256_of_file
from app.data.rows import RecordColumns, RowColumns
from app.errors import DataError, StorageError
from app.shared_files import read
from app.storage import PlainName, stream_atomically, write_atomically

INDEX_FILE = "index.json"
FORMAT = "arrow-7"
"""The layout of shards. A change needs a new name."""
LENGTH = "length"
"""Column of every shard: the length of each sample, int32."""
VALUE = "value"
"""Column of shards of labelled examples: what the label of each means."""
_MAX_COUNTED = 100
"""Classes of a shard that are counted. The counts of more would be most of an index."""


class Shard(BaseModel):
    """One file of samples."""

    name: PlainName
    rows: int
    bytes: int
    sha256: PlainName
    """Also the name of its copy on a machine that reads it."""
    min_length: int
    max_length: int
    source: int = 0
    """Index of the source of its rows, if there are several."""
    class_rows: dict[int, int] | None = None
    """Rows of each class that it has. None: it has no classes or too many."""
    totals: dict[str, int] = {}
    """Sum of each column of counts, such as lengths."""


class ShardIndex(BaseModel):
    """What a folder of shards holds, and how it was made."""

    format: str = FORMAT
    fingerprint: str
    """sha256 of the source and of the settings."""
    created: datetime
    task: str
    source: str
    settings: dict[str, Any]
    columns: RowColumns | RecordColumns | None = None
    """The columns or the fields of the inputs, if they are rows or records."""
    splits: dict[str, list[Shard]]

    @property
    def rows(self) -> dict[str, int]:
        """Rows by split."""
        return {split: sum(shard.rows for shard in shards) for split, shards in self.splits.items()}

    @property
    def bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.bytes for shards in self.splits.values() for shard in shards)

    @property
    def sha256(self) -> str:
        """sha256 over the checksums of all shards: everything that the model can see, in order."""
        lines = (f"{split} {shard.sha256}\n" for split, shards in self.splits.items() for shard in shards)
        return sha256_of("".join(lines).encode())

    def save(self, folder: UPath) -> None:
        """Write the index, which completes the folder."""
        write_atomically(folder / INDEX_FILE, self.model_dump_json(indent=1).encode())

    @classmethod
    def load(cls, folder: UPath) -> Self:
        """Return the index of a folder.

        Raises:
            StorageError: there is none, it cannot be read, or another version of Rayloom wrote it.
        """
        if (index := cls.find(folder)) is None:
            raise StorageError(
                f"{str(folder)!r} has no {INDEX_FILE}: its shards were deleted, or are not complete; make them with "
                "'rayloom submit prepare RECIPE'"
            ).of("shards.incomplete")
        return index

    @classmethod
    def find(cls, folder: UPath) -> Self | None:
        """Return the index of a folder; None if there is none. Raises StorageError if it cannot be read."""
        content = read(folder / INDEX_FILE)
        if content is None:
            return None
        try:
            index = cls.model_validate_json(content)
        except ValidationError as error:
            raise StorageError(
                f"{str(folder / INDEX_FILE)!r} is not an index of shards ({error.error_count()} errors): delete the "
                "folder, and prepare the data again"
            ).of("shards.index_damaged") from error
        if index.format != FORMAT:
            raise StorageError(
                f"{str(folder)!r} has shards in the format {index.format!r}, expected {FORMAT!r}: delete the folder, "
                "and prepare the data again"
            ).of("shards.format")
        return index


@dataclass(frozen=True)
class ShardPlace:
    """Where shards are written, and how large they are."""

    folder: UPath
    prefix: str
    """Files are named ``PREFIX-NUMBER.arrow``."""
    size: int
    """Bytes of rows at which a file is full."""
    max_rows: int | None = None
    """Rows after these are left out. None: all are written."""


class ShardWriter:
    """Writes rows as shards, one at a time: it holds the rows of one shard in memory, and copies of them."""

    def __init__(self, place: ShardPlace, schema: pa.Schema) -> None:
        self.place, self._schema, self._left = place, schema, place.max_rows
        self._batches: list[pa.RecordBatch] = []
        self._bytes = 0
        self.shards: list[Shard] = []
        """The shards that are written."""

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows. Raises DataError if their columns are not those of the other shards."""
        if batch.schema != self._schema:
            raise DataError(f"rows have the columns {batch.schema.names}: expected {self._schema.names}").of(
                "columns.differ"
            )
        if self._left is not None:
            batch = batch.slice(0, self._left)
            self._left -= batch.num_rows
        while batch.num_rows:
            # The same rows give the same shards, however they are split into batches.
            count = min(batch.num_rows, self._rows_left(batch))
            self._batches.append(batch.slice(0, count))
            self._bytes += self._batches[-1].nbytes
            batch = batch.slice(count)
            if self._bytes >= self.place.size:
                self._write()

    def close(self) -> list[Shard]:
        """Write what is left, and return all shards."""
        if self._batches:
            self._write()
        return self.shards

    def _rows_left(self, batch: pa.RecordBatch) -> int:
        """Return the number of rows of the batch that fit, or the one row that fills the shard."""
        room, low, high = self.place.size - self._bytes, 1, batch.num_rows
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if batch.slice(0, middle).nbytes >= room else (middle + 1, high)
        return low

    def _write(self) -> None:
        rows = pa.Table.from_batches(self._batches, self._schema)
        # Both copy: a slice alone would be written with the padding of the array that it was cut from.
        rows = rows.combine_chunks() if len(self._batches) > 1 else rows.take(pa.array(np.arange(rows.num_rows)))
        self._batches, self._bytes = [], 0
        name = f"{self.place.prefix}-{len(self.shards):03d}.arrow"
        with stream_atomically(self.place.folder / name) as file:
            # One record batch, whose columns can be memory-mapped.
            with pa.ipc.new_file(file, rows.schema) as table:
                table.write_table(rows)
            file.flush()
            size, sha256 = file.tell(), sha256_of_file(Path(file.name))
        lengths = rows[LENGTH].to_numpy()
        self.shards.append(
            Shard(
                name=name,
                rows=rows.num_rows,
                bytes=size,
                sha256=sha256,
                min_length=int(lengths.min()),
                max_length=int(lengths.max()),
                class_rows=_count_classes(rows),
                totals=_totals(rows),
            )
        )


def _count_classes(rows: pa.Table) -> dict[int, int] | None:
    if VALUE not in rows.column_names or not pa.types.is_integer(rows[VALUE].type):
        return None
    classes, counts = np.unique(rows[VALUE].to_numpy(), return_counts=True)
    return dict(zip(classes.tolist(), counts.tolist(), strict=True)) if len(classes) <= _MAX_COUNTED else None


def _totals(rows: pa.Table) -> dict[str, int]:
    counts = [field.name for field in rows.schema if field.type == pa.int32() and field.name != VALUE]
    return {name: pc.sum(rows[name]).as_py() for name in counts}


class OpenShard:
    """The rows of a shard, memory-mapped.

    Texts and contents of files are read by system calls: the kernel maps up to 2 MB around each one that is read, which
    counts as memory of this process.
    """

    def __init__(self, path: Path) -> None:
        """Open a file. Raises FileNotFoundError, and ArrowInvalid if it is no shard."""
        with pa.memory_map(str(path)) as mapped:
            content = mapped.read_buffer()
        self.path, self.rows = path, pa.ipc.open_file(content).get_batch(0)
        self._file, self._address = pa.OSFile(str(path)), content.address
        self._takes: dict[str, _Take] = {}

    def take(self, name: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return some rows of a column, of shape (rows,), or (rows, size) if they are lists of one size.

        Cells that are not numbers are Python objects. Raises StorageError if the file has become shorter.
        """
        # A batch has few rows of each shard, so finding out how to read a column would take longer than reading it.
        if (take := self._takes.get(name)) is None:
            take = self._takes[name] = self._take_of(self.rows.column(name))
        return take(rows)

    def _take_of(self, column: pa.Array) -> "_Take":
        """Return a function that takes rows of a column."""
        are_lists = pa.types.is_fixed_size_list(column.type)
        shape = (-1, column.type.list_size) if are_lists else (-1,)
        if pa.types.is_primitive(column.type.value_type if are_lists else column.type):
            # Nothing is copied before rows are chosen.
            cells = (column.values if are_lists else column).to_numpy().reshape(shape)
            return partial(cells.take, axis=0)
        if column.type in (pa.string(), pa.binary()) and not column.null_count:
            return self._take_of_contents(column)
        if are_lists:
            return lambda rows: column.take(pa.array(rows)).values.to_numpy(zero_copy_only=False).reshape(shape)
        return lambda rows: np.fromiter(column.take(pa.array(rows)).to_pylist(), object, len(rows))

    def _take_of_contents(self, column: pa.Array) -> "_Take":
        """Return a function that reads texts or contents of files."""
        _, offsets, content = column.buffers()
        # The address means nothing if all are empty.
        bounds, first = np.frombuffer(offsets, np.int32), content.address - self._address
        # A function that holds ``self`` would keep the shard open.
        path, descriptor, are_texts = self.path, self._file.fileno(), column.type == pa.string()

        def take(rows: NDArray[np.int64]) -> NDArray[Any]:
            starts, ends = bounds[rows].tolist(), bounds[rows + 1].tolist()
            cells: list[Any] = [
                os.pread(descriptor, end - start, first + start) if end > start else b""
                for start, end in zip(starts, ends, strict=True)
            ]
            if sum(map(len, cells)) != sum(ends) - sum(starts):
                raise StorageError(f"shard {str(path)!r} became shorter while it was read: prepare the data again").of(
                    "shard.changed"
                )
            return np.fromiter(map(bytes.decode, cells) if are_texts else cells, object, len(rows))

        return take


_Take = Callable[[NDArray[np.int64]], NDArray[Any]]
"""A function that returns rows of one column of a shard."""


def require_intact(path: str, shard: Shard, found: str) -> None:
    """Compare a shard's checksum with that of the index. Raises StorageError."""
    if found != shard.sha256:
        raise StorageError(
            f"shard {path!r} is torn or was changed: its sha256 is {found[:12]}…, the index has {shard.sha256[:12]}…; "
            "delete its folder with 'rayloom data delete', and prepare the data again"
        ).of("shard.torn")
