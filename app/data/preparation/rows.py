"""The rows of a unit, read in batches of bounded size from every format."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import groupby, repeat
from typing import Any, BinaryIO

import orjson
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from app.conditional import map_concurrently
from app.data.builtin import BUILTIN, BUILTIN_DOCUMENTS
from app.data.examples import Input
from app.data.preparation.units import Piece, Unit
from app.data.sources import Source, find_builtin
from app.errors import DataError
from app.storage import to_path

_BATCH_ROWS, _BATCH_BYTES = 4096, 4 * 2**20
_FILES = 64
"""Whole files that are read together."""
_MAX_LINE_BYTES = 64 * 2**20
_CSV_BLOCK_BYTES = 16 * 2**20
"""A row of a csv file must fit into a block."""


@dataclass(frozen=True)
class Columns:
    """The columns that are read, by their keys in the recipe."""

    input: str
    label: str | None
    group: str | None

    @property
    def names(self) -> dict[str, str]:
        """The name of each column that is read, by its key."""
        keys = {"data.columns.input": self.input, "data.columns.label": self.label, "data.group_column": self.group}
        return {key: name for key, name in keys.items() if name is not None}


@dataclass(frozen=True)
class Rows:
    """A few rows. ``bytes`` is a text of unknown encoding, or the content of an image file."""

    inputs: Sequence[Input]
    labels: Sequence[str] | None = None
    groups: Sequence[str] | None = None


class RowsDigest:
    """A hash of rows in their order, however they come in batches. Two passes over a source compare theirs."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)

    def add(self, rows: Rows) -> None:
        """Add rows, with their labels and groups."""
        for row in zip(rows.inputs, rows.labels or repeat(""), rows.groups or repeat("")):  # noqa: B905
            for cell in row:
                content = cell.encode("utf-8", "surrogatepass") if isinstance(cell, str) else cell
                self._hash.update(len(content).to_bytes(8))
                self._hash.update(content)

    def digest(self) -> bytes:
        """Return the hash of all rows that were added."""
        return self._hash.digest()


def read_unit(unit: Unit, columns: Columns) -> Iterator[Rows]:
    """Yield the rows of a unit, always in the same order.

    Raises:
        DataError: a file cannot be read, or lacks a column. The message names the file and the row.
    """
    for is_whole, pieces in groupby(unit.pieces, _is_read_whole):
        if is_whole:
            yield from _read_whole(list(pieces))
            continue
        for piece in pieces:
            with _named_in_errors(piece):
                yield from _READERS[piece.kind](piece, columns)


@contextmanager
def _named_in_errors(piece: Piece) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{piece.path!r} is gone: the source changed; prepare it again") from error
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{piece.path!r} cannot be read as {piece.kind} ({error}): write it again") from error


def _is_read_whole(piece: Piece) -> bool:
    return piece.kind == "image" or (piece.kind == "text" and piece.stop is None)


def _read_whole(pieces: Sequence[Piece]) -> Iterator[Rows]:
    """Yield small files, several at a time. From an object store they are read concurrently."""

    def content_of(piece: Piece) -> bytes:
        with _named_in_errors(piece):
            content: bytes = to_path(piece.path).read_bytes()
            return content

    for start in range(0, len(pieces), _FILES):
        some = pieces[start : start + _FILES]
        contents = map_concurrently(to_path(some[0].path), content_of, some)
        labels = [to_path(piece.path).parent.name for piece in some] if some[0].kind == "image" else None
        yield Rows(contents, labels)


def _read_parquet(piece: Piece, columns: Columns) -> Iterator[Rows]:
    with to_path(piece.path).open("rb") as file, pq.ParquetFile(file) as table:
        _require(piece.path, columns, table.schema_arrow.names)
        stop = table.num_row_groups if piece.stop is None else piece.stop
        for group in range(piece.start, stop):
            metadata = table.metadata.row_group(group)
            row_bytes = metadata.total_byte_size // max(1, metadata.num_rows)
            count = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, row_bytes)))
            names = list(columns.names.values())
            for batch in table.iter_batches(count, [group], names):
                yield _rows_of(batch, columns)


def _read_arrow(piece: Piece, columns: Columns) -> Iterator[Rows]:
    with to_path(piece.path).open("rb") as file, pa.ipc.open_file(file) as table:
        _require(piece.path, columns, table.schema.names)
        stop = table.num_record_batches if piece.stop is None else piece.stop
        for number in range(piece.start, stop):
            batch = table.get_batch(number)
            count = max(1, min(_BATCH_ROWS, _BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)))
            for start in range(0, batch.num_rows, count):
                yield _rows_of(batch.slice(start, count), columns)


def _read_csv(piece: Piece, columns: Columns) -> Iterator[Rows]:
    parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
    read = pyarrow.csv.ReadOptions(block_size=_CSV_BLOCK_BYTES, use_threads=False)
    if not piece.bytes:
        return
    with to_path(piece.path).open("rb") as file, pyarrow.csv.open_csv(file, read, parse) as table:
        _require(piece.path, columns, table.schema.names)
    names = list(columns.names.values())
    # Cells are read as texts: Arrow would change one such as 007.
    convert = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), include_columns=names)
    with to_path(piece.path).open("rb") as file, pyarrow.csv.open_csv(file, read, parse, convert) as table:
        for batch in table:
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                yield _rows_of(batch.slice(start, _BATCH_ROWS), columns)


def _read_jsonl(piece: Piece, columns: Columns) -> Iterator[Rows]:
    rows: list[Mapping[str, Any]] = []
    size = 0
    for offset, line in _lines(piece):
        if not line.strip():
            continue
        row = _parse(line, piece.path, offset)
        if not offset:
            _require(piece.path, columns, list(row))
        rows.append(row)
        size += len(line)
        if size >= _BATCH_BYTES or len(rows) == _BATCH_ROWS:
            yield _rows_of_mappings(rows, columns)
            rows, size = [], 0
    if rows:
        yield _rows_of_mappings(rows, columns)


def _parse(line: bytes, path: str, offset: int) -> Mapping[str, Any]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path!r} has a line at byte {offset:,} that is not JSON ({error}): correct it") from error
    if not isinstance(row, dict):
        raise DataError(f"{path!r} has a line at byte {offset:,} that is a {type(row).__name__}: expected an object")
    return row


def _lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in a piece, each with the position of its first byte."""
    with to_path(piece.path).open("rb") as file:
        position = _go_to_line(file, piece.start, piece.path)
        while (piece.stop is None or position < piece.stop) and (line := _read_line(file, piece.path)):
            yield position, line
            position += len(line)


def _go_to_line(file: BinaryIO, start: int, path: str) -> int:
    """Go to the first line that begins at ``start`` or after it, and return its position."""
    if not start:
        return 0
    # If the byte before is the end of a line, the line begins here.
    file.seek(start - 1)
    return start - 1 + len(_read_line(file, path))


def _read_line(file: BinaryIO, path: str) -> bytes:
    line = file.readline(_MAX_LINE_BYTES + 1)
    if len(line) > _MAX_LINE_BYTES:
        raise DataError(
            f"{path!r} has a line of more than {_MAX_LINE_BYTES:,} bytes before byte {file.tell():,}: break it up"
        )
    return line


def _read_text(piece: Piece, columns: Columns) -> Iterator[Rows]:  # noqa: ARG001
    assert piece.stop is not None
    with to_path(piece.path).open("rb") as file:
        first, last = (_go_to_line(file, position, piece.path) for position in (piece.start, piece.stop))
        file.seek(first)
        if content := file.read(last - first):
            yield Rows([content])


def _read_builtin(piece: Piece, columns: Columns) -> Iterator[Rows]:
    source = Source(piece.path)
    if columns.label is None:
        documents = find_builtin(source, BUILTIN_DOCUMENTS)
        assert documents is not None
        yield from (Rows([document]) for document in documents())
        return
    read = find_builtin(source, BUILTIN)
    assert read is not None
    examples = read()
    for start in range(0, len(examples), _BATCH_ROWS):
        part = slice(start, start + _BATCH_ROWS)
        yield Rows(examples.inputs[part], examples.labels[part])


_READERS: dict[str, Callable[[Piece, Columns], Iterator[Rows]]] = {
    "parquet": _read_parquet,
    "arrow": _read_arrow,
    "csv": _read_csv,
    "jsonl": _read_jsonl,
    "text": _read_text,
    "builtin": _read_builtin,
}


def _require(path: str, columns: Columns, found: Sequence[str]) -> None:
    for key, column in columns.names.items():
        if column not in found:
            raise DataError(f"{key} is {column!r}, which {path!r} does not have: it has {', '.join(found)}")


def _rows_of(batch: pa.RecordBatch, columns: Columns) -> Rows:
    def cells(name: str) -> list[str]:
        return [_cell(value) for value in batch.column(batch.schema.get_field_index(name)).to_pylist()]

    return _named(cells, columns)


def _rows_of_mappings(rows: Sequence[Mapping[str, Any]], columns: Columns) -> Rows:
    return _named(lambda name: [_cell(row.get(name)) for row in rows], columns)


def _named(cells: Callable[[str], list[str]], columns: Columns) -> Rows:
    rows = Rows(cells(columns.input))
    if columns.label is not None:
        rows = replace(rows, labels=cells(columns.label))
    return replace(rows, groups=cells(columns.group)) if columns.group is not None else rows


def _cell(value: object) -> str:
    """Return a cell as text. Empty cells become empty texts, as in tables that are held in memory."""
    if isinstance(value, str):
        return value
    return "" if value is None or value != value else str(value)
