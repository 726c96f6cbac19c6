"""The files of a source, cut into units: pieces of bounded size that are surveyed and written one by one.

Units do not depend on who works on them. So a cluster and a single process write the same shards, and an interrupted
preparation goes on with the units that are left.
"""

import re
import tarfile
from collections import ChainMap, Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import PurePosixPath
from typing import Any, Literal, cast

import pyarrow as pa
from upath import UPath

from app.data.examples import Modality
from app.data.sources.cells import Columns, Rows
from app.data.sources.formats import FORMATS, format_of
from app.data.sources.formats.base import DOCUMENTS, Format, Piece, SourceFile
from app.data.sources.formats.builtin import BUILTIN_SETS, BUILTIN_TEST_SETS, TEST_KEY
from app.data.sources.formats.idx import Idx, find_idx
from app.data.sources.source import Source, find_builtin, list_source, open_source
from app.errors import DataError
from app.storage import version_of

Contents = Literal[Modality, "language-modeling", "tagged", "pairs", "chat"]
"""What a source holds: labelled inputs of one kind, documents, tagged texts, pairs or conversations."""
WHOLE = 2**63
"""Bytes of a unit that has all files of a source."""
_READERS = ChainMap[str, Format]({one.name: one for one in (BUILTIN_SETS, BUILTIN_TEST_SETS, Idx())}, FORMATS)
_MARKS = re.compile(r"_SUCCESS|_(committed|started)_\d+|_(common_)?metadata|.*_\$folder\$")
"""Names of marker files without rows, which Spark and Hadoop write beside data files."""
_UNFINISHED = re.compile(r"(^|/)_temporary/")
_VERSIONED = {
    "Delta Lake": re.compile(r"(^|/)_delta_log/"),
    "Iceberg": re.compile(r"(^|/)metadata/[^/]+\.metadata\.json$"),
}
"""Signs of a table whose folder keeps files of earlier versions, by table format."""
_FILES_OF_CLASSES: dict[str, str] = {"image": "pictures", "audio": "recordings"}


@dataclass(frozen=True)
class Unit:
    """Pieces that are read one after another."""

    number: int
    pieces: tuple[Piece, ...]
    source: int = 0
    """Index of its source, if there are several."""
    is_test: bool = False
    """Whether it is of ``data.test_source``."""

    @property
    def bytes(self) -> int:
        """Bytes that are read."""
        return sum(piece.bytes for piece in self.pieces)


def list_files(source: Source, contents: Contents) -> list[SourceFile]:
    """Return the files of a source that a task reads, as ``list_all``."""
    return list_all(source, contents)[0]


def list_all(source: Source, contents: Contents) -> tuple[list[SourceFile], list[str]]:
    """List the files of a source that a task reads, sorted by path, and the paths of the others.

    It takes one listing, however many there are.

    Raises:
        DataError: the source does not exist, has no file that the task reads, or has a class without one.
    """
    sets = BUILTIN_TEST_SETS if source.key == TEST_KEY else BUILTIN_SETS
    if find_builtin(source, sets.known(contents)) is not None:
        return [SourceFile(source.uri, sets.name, 0, "")], []
    root = open_source(source)
    listed = list_source(source, root)
    found = find_idx(source, root, listed) if contents == "image" and root.is_dir() else []
    found = found or _files_of(source, contents, root, listed)
    paths = {file.path for file in found}
    return found, [str(path) for path, _ in listed if str(path) not in paths]


def _files_of(
    source: Source, contents: Contents, root: UPath, listed: Sequence[tuple[UPath, dict[str, Any]]]
) -> list[SourceFile]:
    # A table may name pictures or recordings, or hold them. Beside folders of classes, it is something else.
    read_as = "row" if root.is_file() and contents in _FILES_OF_CLASSES and root.suffix.lower() != ".tar" else contents
    formats = {path: one for path, _ in listed if (one := format_of(path, read_as))}
    if contents == DOCUMENTS:
        formats = {path: one for path, one in formats.items() if not _MARKS.fullmatch(path.name)}
    if root.is_dir() and (tables := [path for path, one in formats.items() if one.has_columns]):
        _require_plain(source, root, [path for path, _ in listed], tables)
    if contents in _FILES_OF_CLASSES and root.is_dir():
        _require_classes(source, root, [path for path, _ in listed], formats, FORMATS[contents].suffixes)
    if not formats:
        raise DataError(f"{source} has none of the files that the task reads: expected {_expected(contents)}").of(
            "source.no_files"
        )
    return [
        SourceFile(str(path), formats[path].name, int(info["size"]), _version(path, info))
        for path, info in listed
        if path in formats
    ]


def _require_plain(source: Source, root: UPath, files: Sequence[UPath], tables: Sequence[UPath]) -> None:
    """Raise DataError if files may hold rows that are not in the table: deleted ones, or an unfinished job's."""
    start = len(str(root).rstrip("/")) + 1
    names = [str(path)[start:] for path in tables]
    if unfinished := next(filter(_UNFINISHED.search, names), None):
        raise DataError(
            f"{source} has {unfinished!r}, which an unfinished job of Spark or Hadoop left: wait until it ends, or "
            "remove its folder _temporary"
        ).of("source.unfinished", source.key)
    for kind, sign in _VERSIONED.items():
        for place in (str(path)[start:] for path in files):
            if (found := sign.search(place)) and any(name.startswith(place[: found.start()]) for name in names):
                raise DataError(
                    f"{source} is a {kind} table, as {place!r} shows, so its files may hold deleted rows: "
                    "export the table as plain Parquet, and name that folder"
                ).of("source.versioned", source.key)


def _version(path: UPath, info: Mapping[str, Any]) -> str:
    if (version := version_of(info)) is None:
        raise DataError(
            f"{str(path)!r}: the storage driver {path.protocol!r} lists neither an ETag nor a time of the last change, "
            "so changes would not be noticed; copy the source to a disk or to S3"
        ).of("storage.no_versions")
    return version


def _expected(contents: Contents) -> str:
    if contents not in _FILES_OF_CLASSES:
        # Documents may have any ending.
        endings = [ending for one in FORMATS.values() for ending in one.suffixes if one.reads(contents, ending)]
        return f"{', '.join(endings[:-1])} or {endings[-1]} files"
    suffixes = ", ".join(FORMATS[contents].suffixes)
    return f"{_FILES_OF_CLASSES[contents]} ({suffixes}) in a folder for each class, or .tar files"


def tell_unread(source: Source, unread: Sequence[str]) -> None:
    """Print how many files of a source are not read, by ending."""
    if unread:
        paths = map(PurePosixPath, unread)
        endings = Counter(path.suffix or path.name for path in paths).most_common(5)
        counts = ", ".join(f"{count:,} {ending}" for ending, count in endings)
        print(f"{source}: {len(unread):,} files are not read ({counts}), such as {unread[0]!r}", flush=True)


def _require_classes(
    source: Source, root: UPath, files: Sequence[UPath], read: Collection[UPath], suffixes: Sequence[str]
) -> None:
    """Raise DataError unless each file that is read lies in the folder of its class, and each class has one.

    ``suffixes`` are the endings that the task reads, for messages.
    """
    for path in read:
        if path.suffix.lower() != ".tar" and len(path.relative_to(root).parts) != 2:
            raise DataError(
                f"{source} has the file {str(path)!r}: expected CLASS/FILE below the source; move it, or give the "
                "folder whose subfolders are the classes"
            ).of("source.layout")
    classes = {path.parent for path in read}
    lacking = [path for path in files if path.parent not in classes and len(path.relative_to(root).parts) == 2]
    if classes and lacking:
        raise DataError(
            f"{source}: the class {lacking[0].parent.name!r} has no file that can be read, but {lacking[0].name!r}: "
            f"expected {', '.join(suffixes)}; convert its files, or move the folder away"
        ).of("class.no_file", source.key)


def cut_sources(sources: Sequence[Sequence[SourceFile]], tests: Sequence[SourceFile], unit_bytes: int) -> list[Unit]:
    """Cut the files of each source into units, as ``cut_units`` does. No unit is of two sources.

    Those of the test source come first: cleaning keeps the first of equal rows.
    """
    units = [replace(unit, is_test=True) for unit in (cut_units(tests, unit_bytes) if tests else ())]
    units += [
        replace(unit, source=place) for place, files in enumerate(sources) for unit in cut_units(files, unit_bytes)
    ]
    return [replace(unit, number=number) for number, unit in enumerate(units)]


def cut_units(files: Sequence[SourceFile], unit_bytes: int) -> list[Unit]:
    """Cut files into units of about ``unit_bytes``.

    Larger csv files are read for it, because only their rows before tell where a row begins. Raises DataError if a file
    is not of the format that its name says.
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
    with _named_in_errors(file.path, file.format):
        yield from _READERS[file.format].cut(file, unit_bytes)


def read_unit(unit: Unit, columns: Columns) -> Iterator[Rows]:
    """Yield the rows of a unit, always in the same order.

    Raises:
        DataError: a file cannot be read, or lacks a column. The message names the file and the row.
    """
    for name, pieces in groupby(unit.pieces, lambda piece: piece.format):
        some = list(pieces)
        with _named_in_errors(some[0].path, name):
            yield from _READERS[name].read(some, columns)


def read_source(source: Source, columns: Columns) -> Iterator[Rows]:
    """Yield all rows of a source, in the order of its files. Files that are not read are counted in the log.

    Raises:
        DataError: as ``list_files`` and ``read_unit``.
    """
    files, unread = list_all(source, cast(Contents, columns.contents))
    tell_unread(source, unread)
    yield from read_files(files, columns)


def read_files(files: Sequence[SourceFile], columns: Columns) -> Iterator[Rows]:
    """Yield all rows of files, in order. Raises DataError as ``read_unit``."""
    for unit in cut_units(files, WHOLE):
        yield from read_unit(unit, columns)


def column_names(file: SourceFile) -> list[str]:
    """Return the names of a table's columns, in order. Raises DataError if it cannot be read."""
    with _named_in_errors(file.path, file.format):
        return _READERS[file.format].column_names(file.path)


@contextmanager
def _named_in_errors(path: str, format_name: str) -> Iterator[None]:
    """Turn errors of a driver or of Arrow into DataError. Formats that read several files name the file themselves."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{error.filename or path!r} is gone: the source changed; prepare it again").of(
            "source.changed"
        ) from error
    except PermissionError as error:
        raise DataError(f"{path!r} may not be read ({error}): check its rights and the credentials").of(
            "file.forbidden"
        ) from error
    except (pa.ArrowException, tarfile.TarError) as error:
        raise DataError(f"{path!r} cannot be read as {format_name} ({error}): write it again").of(
            "file.unreadable"
        ) from error
    except OSError as error:
        raise DataError(
            f"{path!r} cannot be read ({error}): write it again if it is torn; else prepare the data again"
        ).of("file.unreadable") from error
