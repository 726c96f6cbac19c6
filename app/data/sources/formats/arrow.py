"""Files of Apache Arrow: with random access, as Feather is, or streams, as Hugging Face's datasets write them."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from upath import UPath

from app.data.sources.cells import BATCH_BYTES, BATCH_ROWS, Columns, Rows, rows_from, rows_of_batch
from app.data.sources.formats.base import HEAD_BYTES, Format, Piece, SourceFile, require_unpacked
from app.errors import DataError
from app.storage import is_local, to_path

_MAGIC, _END = b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"


class Arrow(Format):
    """Record batches. A piece of a file with random access has whole ones; a stream is read as one piece."""

    name, suffixes = "arrow", (".arrow", ".feather")

    def cut(self, file: SourceFile, size: int) -> Iterator[Piece]:
        """Yield a piece for each record batch of a large file."""
        if file.bytes <= size:
            yield Piece(file.path, file.format, file.bytes)
            return
        with _opened(file.path) as table:
            count = None if isinstance(table, pa.ipc.RecordBatchStreamReader) else int(table.num_record_batches)
        if not count:
            yield Piece(file.path, file.format, file.bytes)
            return
        for number in range(count):
            yield Piece(file.path, file.format, file.bytes // count, number, number + 1)

    def column_names(self, path: str) -> list[str]:
        with _opened(path) as table:
            names: list[str] = table.schema.names
        return names

    def read(self, pieces: Sequence[Piece], columns: Columns) -> Iterator[Rows]:
        for piece in pieces:
            with _opened(piece.path) as table:
                columns.require_in(piece.path, table.schema.names)
                row = 1
                # The number of rows before it is not known, unless all of them are read.
                where = f" of record batch {piece.start + 1}" if piece.start else ""
                for batch in _batches(table, piece):
                    names = [name for name in columns.names if name in batch.schema.names]
                    yield from batch_rows(batch.select(names), columns, piece.path, row, where)
                    row += batch.num_rows


def batch_rows(batch: pa.RecordBatch, columns: Columns, path: str, row: int, where: str = "") -> Iterator[Rows]:
    """Yield the rows of a batch, a few at a time: as Python objects they take more memory.

    Args:
        row: number of the first row.
        where: what it is counted from, if it is not the beginning of the file.
    """
    max_rows, start = rows_that_fit(batch), 0
    count = min(max_rows, columns.num_first)
    while start < batch.num_rows:
        rows = rows_of_batch(batch.slice(start, count), columns, path, rows_from(path, row + start, where))
        yield rows
        start, count = start + count, min(max_rows, rows.num_next)


def rows_that_fit(batch: pa.RecordBatch) -> int:
    """Return how many rows like these to read at a time; at least one."""
    size, rows = sum(_decoded_bytes(column) for column in batch.columns), int(batch.num_rows)
    return max(1, min(BATCH_ROWS, BATCH_BYTES * rows // max(1, size)))


def _decoded_bytes(column: pa.Array) -> int:
    """Return the approximate decoded bytes of a column. A dictionary stores each text once."""
    stored = column.dictionary if pa.types.is_dictionary(column.type) else column
    size: int = stored.nbytes * len(column) // max(1, len(stored))
    return size


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    location = to_path(path)
    with location.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(_MAGIC):
        # A memory-mapped batch takes no memory of its own.
        with (
            pa.memory_map(location.path) if is_local(location) else location.open("rb") as file,
            pa.ipc.open_file(file) as table,
        ):
            yield table
        return
    require_unpacked(path, head)
    with location.open("rb") as file, pa.ipc.open_stream(file) as table:
        _require_end(path, location)
        yield table


def _require_end(path: str, location: UPath) -> None:
    """Raise DataError if a stream has no end. Arrow takes one that stops after a record batch for a whole one."""
    with location.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - len(_END)))
        if file.read() != _END:
            raise DataError(
                f"{path!r} is torn: the stream has no end-of-stream marker; write it again, and close its writer"
            ).of("file.torn")


def _batches(table: Any, piece: Piece) -> Iterator[pa.RecordBatch]:
    if isinstance(table, pa.RecordBatchStreamReader):
        yield from table
        return
    stop = table.num_record_batches if piece.stop is None else piece.stop
    yield from (table.get_batch(number) for number in range(piece.start, stop))
