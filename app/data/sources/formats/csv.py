"""Tables of comma-separated values, read by Arrow. The first row has the names of the columns."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.csv

from app.data.sources.cells import Columns, Rows
from app.data.sources.formats.arrow import batch_rows
from app.data.sources.formats.base import Format, Piece, SourceFile, require_text
from app.data.sources.lines import BOM, CSV_BLOCK_BYTES, csv_row_ends
from app.errors import DataError
from app.storage import to_path

_BLOCK_BYTES = 2 * 2**20
"""Bytes that are read at a time, unless a row is longer."""
_MAX_SHOWN = 80


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
        with to_path(file.path).open("rb") as opened:
            for end in csv_row_ends(opened, file.path):
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
        where, done = f" after byte {piece.start:,}" if piece.start else "", 0
        for block_bytes in (_BLOCK_BYTES, CSV_BLOCK_BYTES) if start < stop else ():
            row, invalid = 0, list[Any]()
            try:
                for batch in self._batches(piece.path, start, stop, columns, header, block_bytes, invalid):
                    new = batch.slice(max(0, done - row))
                    row += batch.num_rows
                    done = max(done, row)
                    yield from batch_rows(new, columns, piece.path, done - new.num_rows + 1, where)
                return
            except pa.ArrowInvalid as error:
                if invalid:
                    raise self._refusal(piece.path, where, header, invalid[0]) from error
                if "straddling" not in str(error) or block_bytes == CSV_BLOCK_BYTES:
                    raise

    def _batches(
        self,
        path: str,
        start: int,
        stop: int,
        columns: Columns,
        header: _Header,
        block_bytes: int,
        invalid: list[Any],
    ) -> Iterator[pa.RecordBatch]:
        """Yield record batches. Raises pyarrow.ArrowInvalid if a row does not fit into a block, or is ``invalid``."""

        def refuse(row: Any) -> str:
            invalid.append(row)
            return "error"

        parse = pyarrow.csv.ParseOptions(delimiter=self.separator, newlines_in_values=True, invalid_row_handler=refuse)
        read = pyarrow.csv.ReadOptions(block_size=block_bytes, use_threads=False, column_names=header.names)
        names = [name for name in columns.names if name in header.names]
        # Cells are read as bytes: Arrow would change one such as 007, and end at one that is not UTF-8. But a file is
        # named by a text.
        kinds = dict.fromkeys(names, pa.binary())
        kinds |= {column.name: pa.string() for column in columns.all if column.kind == "file"}
        convert = pyarrow.csv.ConvertOptions(column_types=kinds, include_columns=names)
        with (
            to_path(path).open("rb") as file,
            pa.PythonFile(file, "r") as opened,
            pyarrow.csv.open_csv(opened.get_stream(start, stop - start), read, parse, convert) as table,
        ):
            yield from table

    def _header(self, path: str) -> _Header:
        with to_path(path).open("rb") as file:
            require_text(path, file.read(4))
            file.seek(0)
            start = 0
            for end in csv_row_ends(file, path):
                file.seek(start)
                line = file.read(end - start).removeprefix(BOM)
                if line.strip():
                    return _Header(self._names(path, line), end)
                start = end
        return _Header([], start)

    def _names(self, path: str, line: bytes) -> list[str]:
        try:
            return next(csv.reader([line.decode()], delimiter=self.separator))
        except UnicodeDecodeError as error:
            raise DataError(f"{path!r}: the names of the columns are not UTF-8 ({error}): write it in UTF-8") from error

    @staticmethod
    def _refusal(path: str, where: str, header: _Header, row: Any) -> DataError:
        count, expected = row.actual_columns, len(header.names)
        return DataError(
            f"{path!r}, row {row.number:,}{where}: {count} cells, and the header names {expected} columns: "
            f"{row.text[:_MAX_SHOWN]!r}; correct the row, and put a cell with a separator into quotes"
        )
