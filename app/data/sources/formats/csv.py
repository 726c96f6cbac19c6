"""Tables of comma-separated values, read by Arrow. The first row has the names of the columns."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, BinaryIO, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from app.data.sources.cells import Columns, Place, Rows, rows_from, texts_of
from app.data.sources.formats.arrow import batch_rows
from app.data.sources.formats.base import HEAD_BYTES, Format, Piece, SourceFile, require_text
from app.data.sources.lines import BOM, CSV_BLOCK_BYTES, csv_row_ends, open_lines, read_line
from app.errors import DataError
from app.storage import to_path

_BLOCK_BYTES = 2 * 2**20
"""Bytes that are read at a time, unless a row is longer."""
_MAX_SHOWN = 80
_QUOTE = ord('"')


@dataclass(frozen=True)
class _Header:
    """The first row of a file."""

    names: list[str]
    end: int
    """Position after it."""


@dataclass(frozen=True)
class Csv(Format):
    """Rows of cells with a separator between them. A quoted cell may have separators and line ends."""

    name: str
    suffixes: tuple[str, ...]
    separator: str

    def cut(self, file: SourceFile, size: int) -> Iterator[Piece]:
        """Yield pieces that begin with a row. A large file is read for it: only its rows tell where a row begins."""
        if file.bytes <= size:
            yield Piece(file.path, file.format, file.bytes)
            return
        start = end = 0
        with open_lines(file.path) as opened:
            for end in csv_row_ends(opened, file.path, self.separator):
                if end - start >= size:
                    yield Piece(file.path, file.format, end - start, start, end)
                    start = end
        if start < end:
            yield Piece(file.path, file.format, end - start, start, end)

    def column_names(self, path: str) -> list[str]:
        return self._header(path).names

    def read(self, pieces: Sequence[Piece], columns: Columns) -> Iterator[Rows]:
        for piece in pieces:
            header = self._header(piece.path)
            if header.names:
                columns.require_in(piece.path, header.names)
                yield from self._read(piece, columns, header)

    def _read(self, piece: Piece, columns: Columns, header: _Header) -> Iterator[Rows]:
        """Yield rows, in small blocks at first: Arrow needs twenty times the memory of a block."""
        start, stop = max(piece.start, header.end), piece.bytes if piece.stop is None else piece.stop
        part, done = _Part(piece.path, start, stop, f" after byte {piece.start:,}" if piece.start else ""), 0
        for block_bytes in (_BLOCK_BYTES, CSV_BLOCK_BYTES) if start < stop else ():
            row, invalid = 0, list[Any]()
            try:
                for batch in self._batches(part, columns, header, block_bytes, invalid):
                    new = batch.slice(max(0, done - row))
                    row += batch.num_rows
                    done = max(done, row)
                    yield from self._rows(new, columns, part, done - new.num_rows + 1)
                return
            except pa.ArrowInvalid as error:
                if invalid:
                    raise self._refusal(part, header, invalid[0]) from error
                if "straddling" not in str(error) or block_bytes == CSV_BLOCK_BYTES:
                    raise

    def _rows(self, batch: pa.RecordBatch, columns: Columns, part: "_Part", row: int) -> Iterator[Rows]:
        """Yield the rows of a batch of bytes. A file is named by a text."""
        place = rows_from(part.path, row, part.where)
        _require_no_header(batch, place)
        for number, (name, cells) in enumerate(zip(batch.schema.names, batch.columns, strict=True)):
            if batch.nbytes > CSV_BLOCK_BYTES and (pc.max(pc.binary_length(cells)).as_py() or 0) > CSV_BLOCK_BYTES:
                raise DataError(
                    f"{place(0)}, or a row after it: {name!r} has over {CSV_BLOCK_BYTES:,} bytes: break it up"
                ).of("cell.too_large")
            if any(column.kind == "file" and column.name == name for column in columns.all):
                batch = batch.set_column(number, name, texts_of(cells, name, place))
        yield from batch_rows(batch, columns, part.path, row, part.where)

    def _batches(
        self, part: "_Part", columns: Columns, header: _Header, block_bytes: int, invalid: list[Any]
    ) -> Iterator[pa.RecordBatch]:
        """Yield record batches. Raises pyarrow.ArrowInvalid if a row does not fit into a block, or is ``invalid``."""

        def refuse(row: Any) -> str:
            invalid.append(row)
            return "error"

        parse = pyarrow.csv.ParseOptions(delimiter=self.separator, newlines_in_values=True, invalid_row_handler=refuse)
        read = pyarrow.csv.ReadOptions(block_size=block_bytes, use_threads=False, column_names=header.names)
        names = [name for name in columns.names if name in header.names]
        # Cells are read as bytes: Arrow would change one such as 007, and end at one that is not UTF-8.
        convert = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.binary()), include_columns=names)
        with (
            to_path(part.path).open("rb") as file,
            _Quotes(file, part, self.separator) as quotes,
            pa.PythonFile(quotes, "r") as opened,
            pyarrow.csv.open_csv(opened, read, parse, convert) as table,
        ):
            for batch in table:
                quotes.require_closed()
                yield batch

    def _header(self, path: str) -> _Header:
        with open_lines(path) as file:
            require_text(path, file.read(HEAD_BYTES))
            file.seek(0)
            start = 0
            for end in csv_row_ends(file, path, self.separator):
                file.seek(start)
                line = file.read(end - start)
                if line.removeprefix(BOM).strip():
                    return self._names(path, line, start)
                start = end
        return _Header([], start)

    def _names(self, path: str, row: bytes, start: int) -> _Header:
        """Return the header in ``row``, which has more rows if carriage returns end them."""
        content = row.removeprefix(BOM)
        end = start + len(row) - len(content)

        def lines() -> Iterator[str]:
            nonlocal end
            for line in io.StringIO(content.decode(), newline=""):
                end += len(line.encode())
                yield line

        try:
            for names in csv.reader(lines(), delimiter=self.separator, strict=True):
                if len(names) > 1 or "".join(names).strip():
                    return _Header(names, end)
        except UnicodeDecodeError as error:
            raise DataError(f"{path!r}: the names of the columns are not UTF-8 ({error}): write it in UTF-8").of(
                "text.encoding"
            ) from error
        except csv.Error as error:
            raise DataError(f"{path!r}: the names of the columns cannot be read ({error}): is a quote left open?").of(
                "header.unreadable"
            ) from error
        return _Header([], end)

    @staticmethod
    def _refusal(part: "_Part", header: _Header, row: Any) -> DataError:
        count, expected = row.actual_columns, len(header.names)
        why = "is a quote left open?" if row.text.count('"') % 2 else "put a cell with a separator into quotes"
        return DataError(
            f"{part.path!r}, row {row.number:,}{part.where}: {count} cells, and the header names {expected} columns: "
            f"{row.text[:_MAX_SHOWN]!r}; correct the row: {why}"
        ).of("row.cells")


def _require_no_header(batch: pa.RecordBatch, place: Place) -> None:
    """Raise DataError if a row has the names of the columns in its cells, as joined files do."""
    if batch.num_columns > 1:
        is_header = reduce(pc.and_, (pc.equal(batch[name], name.encode()) for name in batch.schema.names))
        if (row := pc.index(is_header, True).as_py()) >= 0:
            raise DataError(f"{place(row)} repeats the names of the columns, as joined files do: remove the row").of(
                "header.repeated"
            )


@dataclass(frozen=True)
class _Part:
    """Rows of a file, from a byte to another."""

    path: str
    start: int
    stop: int
    where: str
    """What the number of a row is counted from, for messages."""


class _Quotes:
    """A part of a file as Arrow reads it, with a look at its quotes.

    Arrow takes what follows a closing quote into the cell, and a quote that is left open takes rows. So each quote must
    begin a cell, end one, or be doubled. Where one does not, Python's reader tells whether its cell is quoted.
    """

    closed = False

    def __init__(self, file: BinaryIO, part: _Part, separator: str) -> None:
        file.seek(part.start)
        self._file, self._part, self._separator = file, part, separator
        self._left = part.stop - part.start
        self._is_edge = np.zeros(256, bool)
        self._is_edge[list(f'\n\r"{separator}'.encode())] = True
        self._tail, self._count = b"\n", 0
        self._is_odd = self._is_checked = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.require_closed()

    def read(self, size: int) -> bytes:
        """Return the next bytes, as Arrow asks for them."""
        content = self._file.read(min(size, self._left))
        if len(content) > 1 and len(content) < self._left and content.endswith(b"\r"):
            # Arrow loses the line feed of a quoted CRLF that two blocks share (apache/arrow#51368).
            self._file.seek(-1, io.SEEK_CUR)
            content = content[:-1]
        self._left -= len(content)
        self._look_at(content or b"\n")
        return content

    def close(self) -> None:
        """Leave the file open: its owner closes it."""

    def _look_at(self, content: bytes) -> None:
        # A quote is judged once the byte after it is known.
        content = self._tail + content
        self._tail = content[-2:]
        if not self._is_odd and b'"' in content:
            given = np.frombuffer(content, np.uint8)
            quotes = np.flatnonzero(given[1:-1] == _QUOTE) + 1
            opening, closing = (quotes[(np.arange(len(quotes)) + self._count) % 2 == which] for which in (0, 1))
            self._count += len(quotes)
            self._is_odd = not (self._is_edge[given[opening - 1]].all() and self._is_edge[given[closing + 1]].all())

    def require_closed(self) -> None:
        """Raise DataError if a quoted cell of what was read goes on after its closing quote, or has none."""
        if self._is_checked or not (self._is_odd or (not self._left and self._count % 2)):
            return
        self._is_checked = True
        number = 0
        try:
            for row in csv.reader(self._lines(), delimiter=self._separator, strict=True):
                number += bool(row)
        except csv.Error as error:
            raise DataError(
                f"{self._part.path!r}, row {number + 1:,}{self._part.where}: a quote is left open, or stands within a "
                f"quoted cell ({error}): write a quote within a cell twice, and close each quoted cell"
            ).of("quote.left_open") from error

    def _lines(self) -> Iterator[str]:
        with open_lines(self._part.path) as file:
            file.seek(self._part.start)
            while file.tell() < self._part.stop and (line := read_line(file, self._part.path)):
                yield from io.StringIO(line.decode("latin-1"), newline="")
