"""Sources of files that are one sample each: pictures and recordings in folders of classes, and documents."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import ClassVar

import pyarrow as pa

from app.data.sources.cells import Columns, Rows, each_at
from app.data.sources.formats.base import DOCUMENTS, Format, Piece, SourceFile, cut_bytes
from app.data.sources.lines import BOM, go_to_line, open_lines
from app.errors import DataError
from app.shared_files import map_concurrently
from app.storage import to_path

IMAGE_SUFFIXES = (
    *(".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".webp", ".gif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".pfm"),
)
AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")
MAX_DOCUMENT_BYTES = 2**20
"""A larger text file is read as several documents, which are cut at ends of lines.

Documents are whole in a split: a few large ones could leave a split empty.
"""
_FILES, _FILES_BYTES = 64, 16 * 2**20
"""Whole files that are read together, at most; one at least."""


@dataclass(frozen=True)
class ClassFolders(Format):
    """Files in folders that are named as their classes, as torchvision's ImageFolder has them."""

    name: str
    suffixes: tuple[str, ...]
    has_columns: ClassVar[bool] = False

    def reads(self, contents: str, suffix: str) -> bool:
        """Return whether the task reads such files, and this is one."""
        return contents == self.name and suffix in self.suffixes

    def read(self, pieces: Sequence[Piece], columns: Columns) -> Iterator[Rows]:
        for some in _grouped(pieces):
            cells = {columns.content.key: pa.array(_contents(some), pa.binary())}
            if columns.label:
                cells[columns.label.key] = pa.array(map(_class_of, some), pa.string())
            yield Rows(cells, each_at([repr(piece.path) for piece in some]))


def _class_of(piece: Piece) -> str:
    folder = PurePosixPath(to_path(piece.path).path).parent.name
    try:
        folder.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{piece.path!r}: the name of the folder is not text in UTF-8: rename it").of(
            "text.encoding"
        ) from error
    return folder.strip()


class TextFiles(Format):
    """Documents: each file is one, if it is not large."""

    name, suffixes = "text", ()
    has_columns: ClassVar[bool] = False

    def reads(self, contents: str, suffix: str) -> bool:  # noqa: ARG002
        """Return whether the task models language. It reads files of any name."""
        return contents == DOCUMENTS

    def cut(self, file: SourceFile, size: int) -> Iterator[Piece]:
        """Yield pieces of a large file, which are documents of their own."""
        size = min(size, MAX_DOCUMENT_BYTES)
        return cut_bytes(file, size) if file.bytes > MAX_DOCUMENT_BYTES else super().cut(file, size)

    def read(self, pieces: Sequence[Piece], columns: Columns) -> Iterator[Rows]:
        for some in _grouped(pieces):
            contents = [_decoded(content, piece) for content, piece in zip(_contents(some), some, strict=True)]
            # A piece without the beginning of a line is part of the piece before.
            kept = [number for number, piece in enumerate(some) if piece.stop is None or contents[number] != ""]
            if kept:
                texts = pa.array([contents[number] for number in kept], pa.string())
                yield Rows({columns.content.key: texts}, each_at([repr(some[number].path) for number in kept]))


def _contents(pieces: Sequence[Piece]) -> list[bytes]:
    """Return the content of files. From an object store they are read concurrently."""
    return map_concurrently(to_path(pieces[0].path), _content, pieces)


def _content(piece: Piece) -> bytes:
    if piece.stop is None:
        content: bytes = to_path(piece.path).read_bytes()
        return content
    with open_lines(piece.path) as file:
        first, last = (go_to_line(file, position, piece.path) for position in (piece.start, piece.stop))
        file.seek(first)
        part: bytes = file.read(last - first)
    return part


def _decoded(content: bytes, piece: Piece) -> str | None:
    """Return a text; None if it is not UTF-8. A byte order mark is removed only at the beginning of a file."""
    try:
        return (content if piece.start else content.removeprefix(BOM)).decode()
    except UnicodeDecodeError:
        return None


def _grouped(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    some: list[Piece] = []
    for piece in pieces:
        if some and (len(some) == _FILES or sum(other.bytes for other in some) + piece.bytes > _FILES_BYTES):
            yield some
            some = []
        some.append(piece)
    if some:
        yield some
