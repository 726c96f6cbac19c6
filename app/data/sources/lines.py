"""Lines, JSON lines and csv rows of a file, and their byte offsets, at which large files are cut."""

import csv
import json
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import orjson

from app.errors import DataError

BOM = b"\xef\xbb\xbf"
_MAX_LINE_BYTES = 64 * 2**20
CSV_BLOCK_BYTES = 16 * 2**20
"""A row of a csv file must fit into a block."""


def read_line(file: BinaryIO, path: str) -> bytes:
    """Return the next line with its end, or nothing. Raises DataError if it is too long to be held in memory."""
    line = file.readline(_MAX_LINE_BYTES + 1)
    if len(line) > _MAX_LINE_BYTES:
        raise DataError(
            f"{path!r} has a line of more than {_MAX_LINE_BYTES:,} bytes before byte {file.tell():,}: break it up"
        )
    return line


def go_to_line(file: BinaryIO, start: int, path: str) -> int:
    """Go to the first line that begins at ``start`` or after it, and return its position."""
    if not start:
        return 0
    # If the byte before is the end of a line, the line begins here.
    file.seek(start - 1)
    return start - 1 + len(read_line(file, path))


def parse_line(line: bytes, place: str) -> Mapping[str, Any]:
    """Return the row of a line, which is at ``place``. Raises DataError if it is not a JSON object."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        row = _parse_python(line, place)
    if not isinstance(row, dict):
        raise DataError(f"{place} is a {type(row).__name__}: expected an object")
    return row


def _parse_python(line: bytes, place: str) -> Any:
    """Parse what only Python's json module writes: NaN, and halves of a surrogate pair, as bytes."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON ({error}): correct it") from error
    if not isinstance(row, dict):
        return row
    return {name: _encodable(value) for name, value in row.items()}


def _encodable(value: Any) -> Any:
    """Return a cell as it is; the bytes of a text that is not UTF-8."""
    if not isinstance(value, str):
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogatepass")
    return value


def csv_row_ends(file: BinaryIO, path: str) -> Iterator[int]:
    """Yield the position after each row of a csv file. A quoted cell may contain line ends.

    Raises:
        DataError: a row is too long to be held in memory.
    """
    # The limit is per process. This one is higher than Python's.
    csv.field_size_limit(max(csv.field_size_limit(), CSV_BLOCK_BYTES))
    position = 0

    def lines(first: bytes) -> Iterator[str]:
        nonlocal position
        line = first
        while line:
            yield line.decode("latin-1")
            line = read_line(file, path)
            position += len(line)

    while line := read_line(file, path):
        begin, position = position, position + len(line)
        if b'"' in line:
            try:
                next(csv.reader(lines(line)), None)
            except csv.Error as error:
                raise DataError(
                    f"{path!r} has a row at byte {begin:,} that cannot be read ({error}): is a quote left open?"
                ) from error
        yield position
