"""Lines, JSON lines and csv rows of a file, and their byte offsets, at which large files are cut."""

import csv
import io
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import orjson

from app.data.sources.cells import kind_in_words
from app.errors import DataError
from app.storage import to_path

BOM = b"\xef\xbb\xbf"
_MAX_LINE_BYTES = 64 * 2**20
_BUFFER_BYTES = 2**20
CSV_BLOCK_BYTES = 16 * 2**20
"""A row of a csv file must fit into a block."""


@contextmanager
def open_lines(path: str) -> Iterator[BinaryIO]:
    """Open a file for ``read_line``. Files of fsspec are wrapped, as their ``readline`` takes no limit."""
    with to_path(path).open("rb") as file:
        yield file if isinstance(file, io.BufferedReader) else cast(BinaryIO, io.BufferedReader(file, _BUFFER_BYTES))


def read_line(file: BinaryIO, path: str) -> bytes:
    """Return the next line with its end, or nothing. Raises DataError if it is too long to be held in memory."""
    line = file.readline(_MAX_LINE_BYTES + 1)
    if len(line) > _MAX_LINE_BYTES:
        raise DataError(
            f"{path!r} has a line of more than {_MAX_LINE_BYTES:,} bytes before byte {file.tell():,}: break it up"
        ).of("line.too_long")
    return line


def go_to_line(file: BinaryIO, start: int, path: str) -> int:
    """Go to the first line that begins at ``start`` or after it, and return its position."""
    if not start:
        return 0
    # If the byte before is the end of a line, the line begins here.
    file.seek(start - 1)
    return start - 1 + len(read_line(file, path))


def parse_json(line: bytes, place: Callable[[], str], where: str = "on each line") -> Mapping[str, Any]:
    """Return an object. Raises DataError, with the ``place``, if it is not JSON or has a key twice."""
    line = line.removeprefix(BOM)
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        row = _parse_python(line, place, where)
    if not isinstance(row, dict):
        raise DataError(f"{place()} is {kind_in_words(row)}: expected an object {where}; write it so").of(
            "row.not_an_object"
        )
    # orjson keeps the last of two equal keys, and rounds a whole number of more than 64 bits.
    if (line.count(b":") > len(row) and len(_KEY.findall(line)) > len(row)) or _has_large(row):
        row = _parse_python(line, place, where)
    return cast(Mapping[str, Any], row)


_KEY = re.compile(rb'"\s*:')
"""The end of a key. It may also be part of a text."""
_LARGE = 2.0**63


def _has_large(row: Mapping[str, Any]) -> bool:
    waiting = [*row.values()]
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind is float:
            if abs(value) >= _LARGE:
                return True
        elif kind is list:
            waiting += value
        elif kind is dict:
            waiting += value.values()
    return False


def _parse_python(line: bytes, place: Callable[[], str], where: str) -> Any:
    """Parse what only Python's json module tells: NaN, equal keys, and halves of a surrogate pair, as bytes."""
    try:
        row = json.loads(line.decode(), object_pairs_hook=lambda pairs: _distinct(pairs, place))
    except UnicodeDecodeError as error:
        raise DataError(f"{place()} is not text in UTF-8 ({error}): write the file in UTF-8").of(
            "text.encoding"
        ) from error
    except RecursionError as error:
        raise DataError(f"{place()} has lists or objects within more than 1,000 others: write it flat").of(
            "json.too_deep"
        ) from error
    except ValueError as error:
        raise DataError(f"{place()} is not JSON ({error}): correct it, and write one object {where}").of(
            "json.invalid"
        ) from error
    if not isinstance(row, dict):
        return row
    return {name: _encodable(value) for name, value in row.items()}


def _distinct(pairs: Sequence[tuple[str, Any]], place: Callable[[], str]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{place()} has the key {twice!r} twice in one object: rename or remove one").of("key.repeated")
    return row


def _encodable(value: Any) -> Any:
    """Return a cell as it is; the bytes of a text that is not UTF-8."""
    if not isinstance(value, str):
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogatepass")
    return value


def csv_row_ends(file: BinaryIO, path: str, separator: str = ",") -> Iterator[int]:
    """Yield the position after each line of a csv file that ends a row. A quoted cell may contain line ends.

    Raises:
        DataError: a row is too long to be held in memory.
    """
    # The limit is per process. This one is higher than Python's.
    csv.field_size_limit(max(csv.field_size_limit(), CSV_BLOCK_BYTES))
    position = 0
    waiting = deque[str]()

    def lines() -> Iterator[str]:
        """Yield lines. A carriage return ends one, too."""
        nonlocal position
        while waiting or (line := read_line(file, path)):
            if not waiting:
                position += len(line)
                waiting.extend(io.StringIO(line.decode("latin-1"), newline=""))
            yield waiting.popleft()

    while line := read_line(file, path):
        begin, position = position, position + len(line)
        if b'"' in line:
            waiting.extend(io.StringIO(line.decode("latin-1"), newline=""))
            reader = csv.reader(lines(), delimiter=separator)
            try:
                while waiting:
                    next(reader, None)
            except csv.Error as error:
                raise DataError(
                    f"{path!r} has a row at byte {begin:,} that cannot be read ({error}): is a quote left open?"
                ).of("rows.unreadable") from error
        yield position
