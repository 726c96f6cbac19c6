"""Where a recipe's data lie: a built-in set, or a file or folder that a driver of fsspec lists and opens."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from fsspec import AbstractFileSystem
from upath import UPath

from app.config import CleanConfig
from app.data.examples import Reason
from app.errors import DataError, RayloomError
from app.import_string import did_you_mean
from app.storage import to_path

Found = TypeVar("Found")


@dataclass(frozen=True)
class Source:
    """A source of a recipe. Its string is the key with its value, for messages."""

    uri: str
    key: str = "data.source"

    def __str__(self) -> str:
        return f"{self.key} {self.uri!r}"


def find_builtin(source: Source, known: Mapping[str, Found]) -> Found | None:
    """Return the set that ``builtin:NAME`` names; None for other sources. Raises DataError for an unknown name."""
    scheme, _, name = source.uri.partition(":")
    if scheme != "builtin":
        return None
    if name not in known:
        raise DataError(f"{source}: no built-in set {name!r} for this task; {did_you_mean(name, known)}").of(
            "source.unknown_set"
        )
    return known[name]


def open_source(source: Source) -> UPath:
    """Return the path of a source that is not built in. Raises DataError if it does not exist."""
    with _named_in_errors(source):
        path = to_path(source.uri).expanduser()
        is_there = path.exists()
    if not is_there:
        raise DataError(
            f"{source} does not exist: give builtin:NAME, or the path or URI of a csv, jsonl, "
            "parquet or Arrow file or of a folder"
        ).of("source.missing")
    return path


def require_readable(
    source: Source, dropped: Mapping[Reason, int], given: int, config: CleanConfig, first: str
) -> None:
    """Raise DataError if too many of the ``given`` rows cannot be read. ``first``: where the first of them lies."""
    unreadable: dict[Reason, str] = {"unreadable": "files that cannot be decoded", "not_text": "texts not in UTF-8"}
    for reason, what in unreadable.items():
        if (count := dropped.get(reason, 0)) > config.max_unreadable * given:
            raise DataError(
                f"{source} has {count:,} {what} among {given:,} rows, more than {100 * config.max_unreadable:g}%, such "
                f"as {first}: repair or remove them, or raise data.clean.max_unreadable"
            ).of("rows.unreadable", source.key)


@contextmanager
def _named_in_errors(source: Source) -> Iterator[None]:
    try:
        yield
    except RayloomError:
        raise
    except Exception as error:  # each protocol's driver has errors of its own
        raise DataError(f"{source} cannot be opened ({error}): check the URI and the credentials").of(
            "source.not_opened"
        ) from error


def list_source(source: Source, root: UPath) -> list[tuple[UPath, dict[str, Any]]]:
    """List the files of a source with the driver's metadata, sorted by path. Hidden files are left out.

    It takes one listing, however many there are. Raises DataError if it is refused.
    """
    with _named_in_errors(source):
        if root.is_file():
            return [(root, dict(_resolved(root.fs, root.path, root.fs.info(root.path)))[root.path])]
        found = _found(root.fs, root.path)
        # A driver lists absolute paths, also of a relative folder.
        folder = str(root.fs._strip_protocol(root.path)).rstrip("/")
    inside = {name: name.removeprefix(folder).lstrip("/") for name in found}
    files = [(root / place, found[name]) for name, place in inside.items() if not _is_hidden(place)]
    return sorted(files, key=lambda file: str(file[0]))


def _found(storage: Any, folder: str, *above: str) -> dict[str, dict[str, Any]]:
    """Return the files in a folder and below. Links to folders are followed. ``above``: where earlier ones led."""
    listed = _below(storage, folder)
    return dict(entry for path, info in listed.items() for entry in _resolved(storage, path, info, *above))


def _below(storage: Any, folder: str) -> dict[str, dict[str, Any]]:
    """Return all files below a folder. fsspec's walk would silently skip folders that cannot be listed."""
    if storage.async_impl or type(storage).find is not AbstractFileSystem.find:
        return cast(dict[str, dict[str, Any]], storage.find(folder, detail=True))
    found: dict[str, dict[str, Any]] = {}
    folders = [str(storage._strip_protocol(folder))]
    while folders:
        above = folders.pop()
        for info in storage.ls(above, detail=True):
            path = info["name"].rstrip("/")
            if info["type"] != "directory":
                found[info["name"]] = info
            elif path != above and not _is_skipped(path.rpartition("/")[2]):
                folders.append(path)
    return found


def _is_skipped(folder: str) -> bool:
    """Return whether a folder is hidden, or the ``lost+found`` of a disk, which only root may list."""
    return _is_hidden(folder) or folder == "lost+found"


def _resolved(storage: Any, path: str, info: dict[str, Any], *above: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a file, or what a link on a local disk leads to, with the target's size and time of the last change."""
    if not info.get("islink"):
        if info.get("type") == "other":
            raise DataError(f"{path!r} is a pipe, a socket or a device, not a file: remove it").of("source.no_file")
        if not path.endswith("/"):  # the S3 console makes such an object for a folder
            yield path, info
        return
    target = os.path.realpath(path)
    if not os.path.exists(target):
        raise DataError(
            f"{path!r} is a link to {info['destination']!r}, which does not exist: correct or remove it"
        ).of("link.broken")
    if not os.path.isdir(target):
        yield from _resolved(storage, path, storage.info(target))
        return
    if any(
        os.path.commonpath([place, target]) == target for place in (os.path.realpath(os.path.dirname(path)), *above)
    ):
        raise DataError(f"{path!r} is a link to {info['destination']!r}, a folder that it lies in: remove it").of(
            "link.circular"
        )
    for inside, found in _found(storage, target, target, *above).items():
        yield path + inside.removeprefix(target), found


def _is_hidden(place: str) -> bool:
    return any(part.startswith(".") for part in place.split("/"))
