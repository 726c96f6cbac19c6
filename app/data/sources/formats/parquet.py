"""Tables in Parquet. Row groups are read in small parts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from app.data.sources.cells import BATCH_BYTES, Columns, Rows
from app.data.sources.formats.arrow import batch_rows, rows_that_fit
from app.data.sources.formats.base import Format, Piece, SourceFile
from app.storage import to_path

_FIRST_ROWS = 64
"""Rows of a row group that are read first, to measure their size."""
_BUFFER_BYTES = 2**20
"""Bytes of a column that are read at a time. By default Arrow reads all of a row group."""


class Parquet(Format):
    """Row groups. A piece has whole ones."""

    name, suffixes = "parquet", (".parquet",)

    def cut(self, file: SourceFile, size: int) -> Iterator[Piece]:
        """Yield a piece for each row group of a large file."""
        sizes: list[int] = []
        if file.bytes > size:
            with _opened(file.path) as table:
                sizes = [table.metadata.row_group(number).total_byte_size for number in range(table.num_row_groups)]
        if not sizes:
            yield Piece(file.path, file.format, file.bytes)
            return
        for number, group_bytes in enumerate(sizes):
            yield Piece(file.path, file.format, group_bytes, number, number + 1)

    def column_names(self, path: str) -> list[str]:
        with _opened(path) as table:
            names: list[str] = table.schema_arrow.names
        return names

    def read(self, pieces: Sequence[Piece], columns: Columns) -> Iterator[Rows]:
        for piece in pieces:
            with _opened(piece.path) as table:
                found = table.schema_arrow.names
                columns.require_in(piece.path, found)
                groups = [table.metadata.row_group(group) for group in range(table.num_row_groups)]
                stop = len(groups) if piece.stop is None else piece.stop
                row = 1 + sum(group.num_rows for group in groups[: piece.start])
                for number in range(piece.start, stop):
                    for batch in _row_group_batches(table, number, [name for name in columns.names if name in found]):
                        yield from batch_rows(batch, columns, piece.path, row)
                        row += batch.num_rows


@contextmanager
def _opened(path: str) -> Iterator[pq.ParquetFile]:
    with to_path(path).open("rb") as file, pq.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False) as table:
        yield table


def _row_group_batches(table: pq.ParquetFile, group: int, names: list[str]) -> Iterator[pa.RecordBatch]:
    """Yield a row group in batches of about 4 MiB.

    The metadata give the encoded size, in which a repeated text is stored once. So the first batch is small. If rows
    turn out larger, reading starts again with batches of another size.
    """
    metadata, done = table.metadata.row_group(group), 0
    rows = metadata.num_rows
    count, is_measured = max(1, min(_FIRST_ROWS, BATCH_BYTES * rows // max(1, metadata.total_byte_size))), False
    while done < rows:
        row = 0
        for batch in table.iter_batches(count, [group], names, use_threads=False):
            row += batch.num_rows
            if row <= done:
                continue
            new = batch.slice(batch.num_rows - (row - done))
            done = row
            yield new
            fitting = rows_that_fit(new)
            if 2 * fitting < count or not is_measured:
                count, is_measured = fitting, True
                break
