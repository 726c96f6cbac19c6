"""What a format of files is: how a file is cut into pieces, and how the rows of a piece are read."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from app.data.sources.cells import Columns, Rows
from app.errors import DataError

DOCUMENTS: Literal["language-modeling"] = "language-modeling"
TAGGED: Literal["tagged"] = "tagged"
PAIRS: Literal["pairs"] = "pairs"
CHATS: Literal["chat"] = "chat"
TABLES = frozenset({"text", "row", "record", DOCUMENTS, TAGGED, PAIRS, CHATS})
"""Contents that lie in tables."""

_UNPACK, _UTF_8, _RENAME = "unpack it", "write it in UTF-8", "give it the ending of its format, or write it again"
_OTHERS = {
    b"\x1f\x8b": ("compressed by gzip", _UNPACK),
    b"PK\x03\x04": ("compressed by zip, as .xlsx files are", "unpack it, or save the sheet as csv"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", _UNPACK),
    **{f"BZh{level}1AY&".encode(): ("compressed by bzip2", _UNPACK) for level in range(1, 10)},
    b"\xfd7zXZ": ("compressed by xz", _UNPACK),
    b"\xff\xfe\0\0": ("text in UTF-32", _UTF_8),
    b"\0\0\xfe\xff": ("text in UTF-32", _UTF_8),
    b"\xff\xfe": ("text in UTF-16", _UTF_8),
    b"\xfe\xff": ("text in UTF-16", _UTF_8),
    b"PAR1\x15": ("a parquet table", _RENAME),
    b"ARROW1\0\0": ("an Arrow table", _RENAME),
    b"FEA1\0\0\0\0": ("a Feather file of version 1", "write it with version 2"),
    b"\xd0\xcf\x11\xe0": ("a sheet of Excel", "save it as csv"),
}
"""What files begin with that are no plain text, and the way out."""
HEAD_BYTES = 8
"""Bytes that tell it."""


@dataclass(frozen=True)
class SourceFile:
    """A file of the source, as a listing gives it."""

    path: str
    format: str
    bytes: int
    version: str
    """The store's ETag, or the time of the last change."""

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class Piece:
    """A file, or a part of it.

    Parts are counted in row groups of Parquet, in record batches of Arrow, and in bytes of csv, JSON lines and text.
    """

    path: str
    format: str
    bytes: int
    start: int = 0
    stop: int | None = None
    """None: the end of the file."""


class Format(ABC):
    """A format of files."""

    name: str
    suffixes: tuple[str, ...]
    """Endings of its files, in lower case."""
    has_columns: ClassVar[bool] = True
    """Whether it is a table, whose columns have names."""

    def reads(self, contents: str, suffix: str) -> bool:
        """Return whether a task of these contents reads files with this ending."""
        return suffix in self.suffixes and contents in TABLES

    def cut(self, file: SourceFile, size: int) -> Iterator[Piece]:  # noqa: ARG002
        """Yield pieces of about ``size`` bytes. By default a file is one piece. Raises DataError if it is damaged."""
        yield Piece(file.path, file.format, file.bytes)

    def column_names(self, path: str) -> list[str]:
        """Return the names of the columns of a table, in order. Raises DataError if it cannot be read."""
        raise NotImplementedError

    @abstractmethod
    def read(self, pieces: Sequence[Piece], columns: Columns) -> Iterator[Rows]:
        """Yield the rows of pieces in batches of bounded size, always in the same order.

        Raises:
            DataError: a file lacks a column, or has a cell of another kind. The message names the file and the row.
        """


def cut_bytes(file: SourceFile, size: int) -> Iterator[Piece]:
    """Yield pieces of ``size`` bytes. Readers go on to the end of the line that begins in a piece."""
    for start in range(0, file.bytes, size):
        stop = min(start + size, file.bytes)
        yield Piece(file.path, file.format, stop - start, start, stop)


def require_text(path: str, head: bytes) -> None:
    """Raise DataError if a file that begins with ``head`` is compressed, of another format, or not in UTF-8."""
    require_unpacked(path, head)
    if b"\0" in head:
        raise DataError(f"{path!r} begins with zero bytes, as text in UTF-16 or a torn file does: {_UTF_8}").of(
            "text.encoding"
        )


def require_unpacked(path: str, head: bytes) -> None:
    """Raise DataError if a file that begins with ``head`` is compressed, or of another format than its ending says."""
    if found := next((what for magic, what in _OTHERS.items() if head.startswith(magic)), None):
        raise DataError(f"{path!r} is {found[0]}: {found[1]}").of("file.wrong_kind")
