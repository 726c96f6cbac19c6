"""Versions of the files that table cells name, such as pictures: if one changes, its shards are out of date."""

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Self

from pydantic import BaseModel
from upath import UPath

from app.checksums import sha256_of
from app.shared_files import read
from app.storage import to_path, version_of, write_atomically

_FILE = "named_files.json"


class NamedFiles(BaseModel):
    """Version of each file by its location; None if the file is gone, or on HTTP, which has no listings."""

    versions: dict[str, str | None]

    @classmethod
    def of(cls, locations: Iterable[str]) -> Self:
        """Return the current versions. Lists each folder once."""
        folders = defaultdict[str, list[UPath]](list)
        for location in sorted(locations):
            path = to_path(location)
            folders[str(path.parent)].append(path)
        versions: dict[str, str | None] = {}
        for paths in folders.values():
            versions |= _versions_in(paths)
        return cls(versions=versions)

    @property
    def sha256(self) -> str:
        """sha256 of all versions."""
        return sha256_of(self.model_dump_json().encode())

    def save(self, folder: UPath) -> None:
        """Write the versions beside the shards that were made from the files."""
        write_atomically(folder / _FILE, self.model_dump_json().encode())

    @classmethod
    def find(cls, folder: UPath) -> Self | None:
        """Return what ``save`` wrote; None if tables name no files, or there are no shards yet."""
        content = read(folder / _FILE)
        return None if content is None else cls.model_validate_json(content)


def _versions_in(paths: list[UPath]) -> dict[str, str | None]:
    """Return the versions of files in one folder."""
    if paths[0].protocol in ("http", "https"):
        return {str(path): None for path in paths}
    storage, listed = paths[0].fs, dict[str, dict[str, Any]]()
    with suppress(FileNotFoundError, NotADirectoryError):
        listed = {info["name"]: info for info in storage.ls(paths[0].parent.path, detail=True)}
    found = [listed.get(storage._strip_protocol(path.path)) for path in paths]
    return {str(path): _version(info) for path, info in zip(paths, found, strict=True)}


def _version(info: dict[str, Any] | None) -> str | None:
    return None if info is None else f"{info['size']} {version_of(info)}"
