"""Files of Apache Arrow: with random access, as Feather is, or streams, as Hugging Face's datasets write them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from app.data.sources.cells import BATCH_BYTES, BATCH_ROWS, Columns, Rows, rows_from, rows_of_batch
from app.data.sources.formats.base import Format, Piece, SourceFile
from app.errors import DataError
from app.storage import is_local, to_path

_MAGIC = b"ARROW1"


class Arrow(Format):
    """Record batches. A piece of a file with random access has whole ones; a stream is read as one piece."""

    name, suffixes = "arrow", (".arrow", ".feather")

    def cut(self, file: SourceFile, size: int) -> Iterator[Piece]:
        """Yield a piece for each record batch of a large file."""
        if file.bytes <= size or not _has_random_access(file.path):
            yield Piece(file.path, file.format, file.bytes)
            return
        try:
            with _opened(file.path) as table:
                count: int = table.num_record_batches
        except pa.ArrowInvalid as error:
            raise DataError(f"{file.path!r} is not an Arrow file ({error}): write it again") from error
        for number in range(count):
            yield Piece(file.path, file.format, file.bytes // max(1, count), number, number + 1)

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
    count = rows_that_fit(batch)
    for start in range(0, batch.num_rows, count):
        yield rows_of_batch(batch.slice(start, count), columns, path, rows_from(path, row + start, where))


def rows_that_fit(batch: pa.RecordBatch) -> int:
    """Return how many rows like these to read at a time; at least one."""
    size, rows = sum(_decoded_bytes(column) for column in batch.columns), int(batch.num_rows)
    return max(1, min(BATCH_ROWS, BATCH_BYTES * rows // max(1, size)))


def _decoded_bytes(column: pa.Array) -> int:
    """Return the approximate decoded bytes of a column. A dictionary stores each text once."""
    stored = column.dictionary if pa.types.is_dictionary(column.type) else column
    size: int = stored.nbytes * len(column) // max(1, len(stored))
    return size


def _has_random_access(path: str) -> bool:
    with to_path(path).open("rb") as file:
        head: bytes = file.read(len(_MAGIC))
    return head == _MAGIC


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    location = to_path(path)
    # A memory-mapped batch takes no memory of its own.
    with (
        pa.memory_map(location.path) if is_local(location) else location.open("rb") as file,
        pa.ipc.open_file(file) if _has_random_access(path) else pa.ipc.open_stream(file) as table,
    ):
        yield table


def _batches(table: Any, piece: Piece) -> Iterator[pa.RecordBatch]:
    if isinstance(table, pa.RecordBatchStreamReader):
        yield from table
        return
    stop = table.num_record_batches if piece.stop is None else piece.stop
    yield from (table.get_batch(number) for number in range(piece.start, stop))
