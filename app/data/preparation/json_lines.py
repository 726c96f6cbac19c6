"""JSON lines: an object in each, whose keys are columns."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from app.data.examples import Input
from app.data.preparation.lines import BOM, go_to_line, parse_line, read_line
from app.data.preparation.rows import BATCH_BYTES, BATCH_ROWS, CellType, Columns, Rows, cell_text, rows_of_cells
from app.data.preparation.units import Piece
from app.errors import DataError
from app.storage import to_path

_TYPES: dict[type, CellType] = {str: "text", bytes: "text", bool: "boolean", int: "integer", float: "number"}


def read_jsonl(piece: Piece, columns: Columns) -> Iterator[Rows]:
    """Yield the rows whose lines begin in a piece. Raises DataError for a line that is not a row."""
    rows: list[Mapping[str, Any]] = []
    offsets: list[int] = []
    size = 0
    for offset, line in _lines(piece):
        if not line.strip():
            continue
        rows.append(parse_line(line, piece.path, offset))
        offsets.append(offset)
        size += len(line)
        if size >= BATCH_BYTES or len(rows) == BATCH_ROWS:
            yield _rows_of(rows, offsets, columns, piece.path)
            rows, offsets, size = [], [], 0
    if rows:
        yield _rows_of(rows, offsets, columns, piece.path)


def _lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in a piece, each with the position of its first byte."""
    with to_path(piece.path).open("rb") as file:
        position = go_to_line(file, piece.start, piece.path)
        while (piece.stop is None or position < piece.stop) and (line := read_line(file, piece.path)):
            yield position, line if position else line.removeprefix(BOM)
            position += len(line)


def _rows_of(rows: Sequence[Mapping[str, Any]], offsets: Sequence[int], columns: Columns, path: str) -> Rows:
    cells: dict[str, list[Input]] = {}
    types: dict[str, dict[CellType, str]] = {}
    for name in dict.fromkeys(columns.names.values()):
        try:
            values = [row[name] for row in rows]
        except KeyError:
            row, offset = next((row, offset) for row, offset in zip(rows, offsets, strict=True) if name not in row)
            key = next(key for key, column in columns.names.items() if column == name)
            raise DataError(
                f"{key} is {name!r}, which the row at byte {offset:,} of {path!r} does not have: it has "
                f"{', '.join(row)}; give every row the same keys, and null where there is no value"
            ) from None
        cells[name] = [value if type(value) is str else cell_text(value) for value in values]
        types[name] = {}
        for kind in {type(value) for value in values if value is not None and value == value}:
            row_number = next(number for number, value in enumerate(values) if type(value) is kind)
            place = f"{path!r} (byte {offsets[row_number]:,})"
            if kind not in _TYPES:
                raise DataError(f"{place} has a {kind.__name__} in {name!r}: expected a text or a number")
            types[name].setdefault(_TYPES[kind], place)
    return rows_of_cells(cells, columns, types, lambda row: f"{path!r}, byte {offsets[row]:,}")
