"""JSON lines: an object in each, whose keys are columns. Only a line feed ends a line."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from app.data.sources.cells import BATCH_BYTES, Columns, Rows, rows_of_objects
from app.data.sources.formats.base import HEAD_BYTES, Format, Piece, SourceFile, cut_bytes, require_text
from app.data.sources.lines import BOM, go_to_line, open_lines, parse_json, read_line


class JsonLines(Format):
    """A piece has the lines that begin in it."""

    name, suffixes = "jsonl", (".jsonl", ".ndjson")

    def cut(self, file: SourceFile, size: int) -> Iterator[Piece]:
        """Yield pieces of ``size`` bytes."""
        return cut_bytes(file, size) if file.bytes > size else super().cut(file, size)

    def column_names(self, path: str) -> list[str]:
        """Return all keys of all rows, in the order in which they come first."""
        names = dict[str, None]()
        for _, row in _rows(Piece(path, self.name, 0)):
            names |= dict.fromkeys(row)
        return list(names)

    def read(self, pieces: Sequence[Piece], columns: Columns) -> Iterator[Rows]:
        for piece in pieces:
            yield from _read(piece, columns)


def _read(piece: Piece, columns: Columns) -> Iterator[Rows]:
    rows: list[Mapping[str, Any]] = []
    numbers: list[int] = []
    last, count = 0, columns.num_first

    def taken() -> Rows:
        some = numbers
        return rows_of_objects(rows, columns, piece.path, lambda row: _place(piece, some[row]))

    for (number, position), row in _rows(piece):
        rows.append(row)
        numbers.append(number)
        if position - last >= BATCH_BYTES or len(rows) == count:
            some = taken()
            yield some
            rows, numbers, last, count = [], [], position, some.num_next
    if rows:
        yield taken()


def _rows(piece: Piece) -> Iterator[tuple[tuple[int, int], Mapping[str, Any]]]:
    """Yield the number of each line that begins in a piece and the position after it, and its row."""
    with open_lines(piece.path) as file:
        if not piece.start:
            require_text(piece.path, file.read(HEAD_BYTES))
            file.seek(0)
        position, number = go_to_line(file, piece.start, piece.path), 0
        while (piece.stop is None or position < piece.stop) and (line := read_line(file, piece.path)):
            position, number = position + len(line), number + 1
            if line.removeprefix(BOM).strip():
                yield (number, position), parse_json(line, partial(_place, piece, number))


def _place(piece: Piece, number: int) -> str:
    return f"{piece.path!r}, line {number:,}{f' after byte {piece.start:,}' if piece.start else ''}"
