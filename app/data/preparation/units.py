"""The files of a source, cut into units: pieces of bounded size that are surveyed and written one by one.

Units do not depend on who works on them. So a cluster and a single process write the same shards, and an interrupted
preparation goes on with the units that are left.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from upath import UPath

from app.config import DataConfig
from app.data.builtin import BUILTIN, BUILTIN_DOCUMENTS
from app.data.examples import Modality
from app.data.preparation.lines import csv_row_ends
from app.data.sources import IMAGE_SUFFIXES, Source, find_builtin, list_source, open_source, require_class_folders
from app.errors import DataError
from app.storage import to_path

Contents = Literal[Modality, "language-modeling"]
"""What a source holds: labelled inputs of one kind, or documents to model the language of."""
Kind = Literal["parquet", "arrow", "csv", "jsonl", "text", "image", "tar", "builtin"]
_TABLES: dict[str, Kind] = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".csv": "csv",
    ".jsonl": "jsonl",
}
_VERSION_KEYS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")
"""What drivers of fsspec call the version of a file, or the time of its last change."""
TABLE_KINDS = frozenset({*_TABLES.values(), "tar"})
"""Kinds whose rows can have a group."""
MAX_DOCUMENT_BYTES = 2**20
"""A larger text file is read as several documents, which are cut at ends of lines.

Documents are whole in a split: a few large ones could leave a split empty.
"""


@dataclass(frozen=True)
class SourceFile:
    """A file of the source, as a listing gives it."""

    path: str
    kind: Kind
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
    kind: Kind
    bytes: int
    start: int = 0
    stop: int | None = None
    """None: the end of the file."""


@dataclass(frozen=True)
class Unit:
    """Pieces that are read one after another."""

    number: int
    pieces: tuple[Piece, ...]
    source: int = 0
    """Index of its source, if there are several."""

    @property
    def bytes(self) -> int:
        """Bytes that are read."""
        return sum(piece.bytes for piece in self.pieces)


def list_files(config: DataConfig, contents: Contents) -> list[SourceFile]:
    """List the files of ``data.source``, sorted by path. It takes one listing, however many there are.

    Raises:
        DataError: the source does not exist, or has no file that the task reads.
    """
    source = Source(config.source)
    known: dict[str, Any] = dict(BUILTIN_DOCUMENTS if contents == "language-modeling" else BUILTIN)
    if find_builtin(source, known) is not None:
        return [SourceFile(config.source, "builtin", 0, "")]
    root = open_source(source)
    files = list_source(source, root)
    kinds = {path: kind for path, _ in files if (kind := _kind_of(path, contents))}
    require_class_folders(source, root, (path for path, kind in kinds.items() if kind == "image"))
    found = [
        SourceFile(str(path), kinds[path], int(info["size"]), _version_of(path, info))
        for path, info in files
        if path in kinds
    ]
    if not found:
        expected = "PNG or JPEG files in a folder for each class" if contents == "image" else f"{', '.join(_TABLES)}"
        expected += ", or .tar files"
        raise DataError(f"{source} has none of the files that the task reads: expected {expected}")
    return found


def list_unread(config: DataConfig, contents: Contents) -> list[str]:
    """List the files of ``data.source`` that the task does not read. Hidden files are left out."""
    source = Source(config.source)
    if source.uri.startswith("builtin:"):
        return []
    files = list_source(source, open_source(source))
    return [str(path) for path, _ in files if _kind_of(path, contents) is None]


def cut_sources(sources: Sequence[Sequence[SourceFile]], unit_bytes: int) -> list[Unit]:
    """Cut the files of each source into units, as ``cut_units`` does. No unit is of two sources."""
    units = [
        replace(unit, source=place) for place, files in enumerate(sources) for unit in cut_units(files, unit_bytes)
    ]
    return [replace(unit, number=number) for number, unit in enumerate(units)]


def cut_units(files: Sequence[SourceFile], unit_bytes: int) -> list[Unit]:
    """Cut files into units of about ``unit_bytes``.

    Larger csv files are read for it, because only their rows before tell where a row begins. Raises DataError if a file
    is not of the kind that its name says.
    """
    units: list[Unit] = []
    pieces: list[Piece] = []
    size = 0
    for piece in (piece for file in files for piece in _cut(file, unit_bytes)):
        if pieces and size + piece.bytes > unit_bytes:
            units.append(Unit(len(units), tuple(pieces)))
            pieces, size = [], 0
        pieces.append(piece)
        size += piece.bytes
    return [*units, Unit(len(units), tuple(pieces))]


def _cut(file: SourceFile, unit_bytes: int) -> Iterator[Piece]:
    if file.kind == "text" and file.bytes > MAX_DOCUMENT_BYTES:
        yield from _cut_bytes(file, min(unit_bytes, MAX_DOCUMENT_BYTES))
    elif file.bytes <= unit_bytes or file.kind in ("text", "image", "tar", "builtin"):
        yield Piece(file.path, file.kind, file.bytes)
    elif file.kind == "csv":
        yield from _cut_csv(file, unit_bytes)
    elif file.kind == "jsonl":
        yield from _cut_bytes(file, unit_bytes)
    else:
        sizes = _parquet_sizes(file) if file.kind == "parquet" else _arrow_sizes(file)
        for number, size in enumerate(sizes):
            yield Piece(file.path, file.kind, size, number, number + 1)


def _cut_bytes(file: SourceFile, size: int) -> Iterator[Piece]:
    for start in range(0, file.bytes, size):
        stop = min(start + size, file.bytes)
        yield Piece(file.path, file.kind, stop - start, start, stop)


def _cut_csv(file: SourceFile, size: int) -> Iterator[Piece]:
    start = end = 0
    with to_path(file.path).open("rb") as opened:
        for end in csv_row_ends(opened, file.path):
            if end - start >= size:
                yield Piece(file.path, file.kind, end - start, start, end)
                start = end
    if start < end:
        yield Piece(file.path, file.kind, end - start, start, end)


def _parquet_sizes(file: SourceFile) -> list[int]:
    """Return the bytes of each row group. Raises DataError if the file is not Parquet."""
    try:
        with to_path(file.path).open("rb") as opened, pq.ParquetFile(opened) as table:
            groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
    except pa.ArrowInvalid as error:
        raise DataError(f"{file.path!r} is not a parquet table ({error}): write it again") from error
    return [group.total_byte_size for group in groups]


def _arrow_sizes(file: SourceFile) -> list[int]:
    """Return an equal share of the bytes for each record batch. Raises DataError if the file is not Arrow."""
    try:
        with to_path(file.path).open("rb") as opened, pa.ipc.open_file(opened) as table:
            count: int = table.num_record_batches
    except pa.ArrowInvalid as error:
        raise DataError(f"{file.path!r} is not an Arrow file ({error}): write it again") from error
    return [file.bytes // max(1, count)] * count


def _version_of(path: UPath, info: dict[str, Any]) -> str:
    """Return what changes with a file. Raises DataError if the listing has nothing."""
    if version := next((value for key in _VERSION_KEYS if (value := info.get(key))), None):
        return str(version)
    raise DataError(
        f"{str(path)!r}: the storage driver {path.protocol!r} lists neither an ETag nor a time of the last change, "
        "so changes would not be noticed; copy the source to a disk or to S3"
    )


def _kind_of(path: UPath, contents: Contents) -> Kind | None:
    """Return how a file is read; None: the task does not read it."""
    suffix = path.suffix.lower()
    if suffix == ".tar":
        return "tar"
    if contents == "image":
        return "image" if suffix in IMAGE_SUFFIXES else None
    return _TABLES.get(suffix) or ("text" if contents == "language-modeling" else None)
