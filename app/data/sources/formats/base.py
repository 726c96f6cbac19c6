"""What a format of files is: how a file is cut into pieces, and how the rows of a piece are read."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from app.data.sources.cells import Columns, Rows
from app.errors import DataError

TEXTS = frozenset({"text", "row", "record"})
"""Contents that lie in tables. Documents of language modelling do, too."""
DOCUMENTS = "language-modeling"

_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
}
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


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
        return suffix in self.suffixes and (contents in TEXTS or contents == DOCUMENTS)

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
    """Raise DataError if a file that begins with ``head`` is compressed, or text in UTF-16."""
    if found := next((name for magic, name in _COMPRESSED.items() if head.startswith(magic)), None):
        raise DataError(f"{path!r} is compressed by {found}: unpack it")
    if head.startswith(_UTF_16):
        raise DataError(f"{path!r} is text in UTF-16: write it in UTF-8")


def require_distinct(path: str, names: Collection[str]) -> None:
    """Raise DataError if two columns have one name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DataError(f"{path!r} has two columns {name!r}: rename one")
        seen.add(name)
