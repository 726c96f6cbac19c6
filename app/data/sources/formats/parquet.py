"""Tables in Parquet. Row groups are read in small parts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from app.data.sources.cells import BATCH_BYTES, Columns, Rows
from app.data.sources.formats.arrow import batch_rows, rows_that_fit
from app.data.sources.formats.base import Format, Piece, SourceFile
from app.storage import to_path

_FIRST_ROWS = 64
"""Rows of a row group that are read first, to measure their size."""
_BUFFER_BYTES, _MIN_BUFFER_BYTES = 2**24, 2**18
"""Buffer of all columns together, and the minimum of one column. By default Arrow reads a whole row group."""


class Parquet(Format):
    """Row groups. A piece has whole ones."""

    name, suffixes = "parquet", (".parquet",)

    def cut(self, file: SourceFile, size: int) -> Iterator[Piece]:
        """Yield a piece for each row group of a large file."""
        sizes: list[int] = []
        if file.bytes > size:
            with _opened(file.path) as opened:
                metadata = _table(opened).metadata
                sizes = [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]
        if not sizes:
            yield Piece(file.path, file.format, file.bytes)
            return
        for number, group_bytes in enumerate(sizes):
            yield Piece(file.path, file.format, group_bytes, number, number + 1)

    def column_names(self, path: str) -> list[str]:
        with _opened(path) as opened:
            names: list[str] = _table(opened).schema_arrow.names
        return names

    def read(self, pieces: Sequence[Piece], columns: Columns) -> Iterator[Rows]:
        # Opening a file reads its metadata, so adjacent row groups share one open file.
        for path, group in groupby(pieces, attrgetter("path")):
            with _opened(path) as opened:
                table = _table(opened, max(_MIN_BUFFER_BYTES, _BUFFER_BYTES // max(1, len(columns.names))))
                found = table.schema_arrow.names
                columns.require_in(path, found)
                reader = _Reader(table, _table(opened), [name for name in columns.names if name in found])
                for piece in group:
                    yield from reader.read(piece, columns)


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    location = to_path(path)
    # Arrow buffers each column itself. Read-ahead by fsspec would fetch far more than the part of a column.
    with location.fs.open(location.path, cache_type="none") as opened:
        yield opened


def _table(opened: Any, buffer_bytes: int = _MIN_BUFFER_BYTES) -> pq.ParquetFile:
    return pq.ParquetFile(opened, buffer_size=buffer_bytes, pre_buffer=False)


@dataclass(frozen=True)
class _Reader:
    """Reads columns of a file."""

    table: pq.ParquetFile
    small: pq.ParquetFile
    """The same file with small buffers, for the first rows of a row group, which are read twice."""
    names: list[str]

    def read(self, piece: Piece, columns: Columns) -> Iterator[Rows]:
        """Yield the rows of some row groups."""
        groups = [self.table.metadata.row_group(group) for group in range(self.table.num_row_groups)]
        stop = len(groups) if piece.stop is None else piece.stop
        row = 1 + sum(group.num_rows for group in groups[: piece.start])
        for number in range(piece.start, stop):
            for batch in self._batches(number):
                yield from batch_rows(batch, columns, piece.path, row)
                row += batch.num_rows

    def _batches(self, group: int) -> Iterator[pa.RecordBatch]:
        """Yield a row group in batches of about 4 MiB.

        The metadata give the encoded size, in which a repeated text is stored once. So the first batch is small. If
        rows turn out larger, reading starts again with batches of another size.
        """
        metadata, done, table = self.table.metadata.row_group(group), 0, self.small
        rows = metadata.num_rows
        count = max(1, min(_FIRST_ROWS, BATCH_BYTES * rows // max(1, metadata.total_byte_size)))
        while done < rows:
            row = 0
            for batch in table.iter_batches(count, [group], self.names, use_threads=False):
                row += batch.num_rows
                if row <= done:
                    continue
                new = batch.slice(batch.num_rows - (row - done))
                done = row
                yield new
                fitting = rows_that_fit(new)
                if 2 * fitting < count or table is self.small:
                    count, table = fitting, self.table
                    break
