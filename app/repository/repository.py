"""Versions of models in storage: ``models/<name>/<version>/``, whole or not there at all."""

import json
import secrets
from datetime import UTC, datetime

from pydantic import ValidationError
from upath import UPath

from app.checksums import checksums_of, read_verified
from app.errors import StorageError
from app.repository.manifest import MANIFEST_FILE, Manifest, ModelCard
from app.storage import is_local, write_atomically

ALIASES_FILE = "aliases.json"
PRODUCTION = "production"


class Repository:
    """The models under a root of storage."""

    def __init__(self, storage: UPath) -> None:
        self._root = storage / "models"

    def names(self) -> list[str]:
        """The models that have a version."""
        if not self._root.exists():
            return []
        return sorted(each.name for each in self._root.iterdir() if self.versions(each.name))

    def versions(self, name: str) -> list[int]:
        """The published versions of a model, ascending. A version is there when its manifest is."""
        folder = self._root / name
        if not folder.exists():
            return []
        found = [each for each in folder.iterdir() if each.name.isdecimal() and (each / MANIFEST_FILE).exists()]
        return sorted(int(each.name) for each in found)

    def publish(self, name: str, files: UPath, card: ModelCard) -> Manifest:
        """Add the files of a folder as the next version, all at once, and return its manifest.

        On a local disk the version is staged and renamed, and a number that another publisher takes meanwhile is
        left to it. An object store cannot rename: there the manifest comes last, and publishers must take turns.
        """
        if is_local(self._root):
            return self._publish_by_rename(name, files, card)
        return self._publish_in_place(name, files, card)

    def _publish_by_rename(self, name: str, files: UPath, card: ModelCard) -> Manifest:
        staged = self._root / name / f".{secrets.token_hex(4)}.tmp"
        try:
            _copy(files, staged)
            while True:
                manifest = self._write_manifest(staged, name, self._next_version(name), card)
                if _renamed(staged, self.folder(name, manifest.version)):
                    return manifest
        except BaseException:
            _remove(staged)
            raise

    def _publish_in_place(self, name: str, files: UPath, card: ModelCard) -> Manifest:
        version = self._next_version(name)
        folder = self.folder(name, version)
        try:
            _copy(files, folder)
            return self._write_manifest(folder, name, version, card)
        except BaseException:
            _remove(folder)
            raise

    @staticmethod
    def _write_manifest(folder: UPath, name: str, version: int, card: ModelCard) -> Manifest:
        manifest = Manifest(
            **card.model_dump(),
            name=name,
            version=version,
            created=datetime.now(UTC),
            files=checksums_of(file for file in folder.iterdir() if file.is_file() and file.name != MANIFEST_FILE),
        )
        write_atomically(folder / MANIFEST_FILE, manifest.model_dump_json(indent=1).encode())
        return manifest

    def _next_version(self, name: str) -> int:
        """One more than any number that is taken, by a version or by one that broke off."""
        model = self._root / name
        taken = [int(each.name) for each in model.iterdir() if each.name.isdecimal()] if model.exists() else []
        return max(taken, default=0) + 1

    def promote(self, name: str, version: int) -> None:
        """Make a version the one in production. Raises StorageError if it is not published."""
        if version not in self.versions(name):
            raise StorageError(
                f"model {name!r} has no version {version}: published are {self.versions(name) or 'none'}"
            )
        content = json.dumps({**self._aliases(name), PRODUCTION: version})
        write_atomically(self._root / name / ALIASES_FILE, content.encode())

    def production(self, name: str) -> int:
        """The version in production. Raises StorageError if there is none."""
        aliases = self._aliases(name)
        if PRODUCTION not in aliases:
            raise StorageError(
                f"model {name!r} has no version in production in {str(self._root)!r} "
                f"(models there: {', '.join(self.names()) or 'none'}): run jobs.compile first"
            )
        return aliases[PRODUCTION]

    def folder(self, name: str, version: int) -> UPath:
        """Where a version lies."""
        return self._root / name / str(version)

    def manifest(self, name: str, version: int) -> Manifest:
        """The manifest of a version. Raises StorageError if there is none, or it is broken."""
        path = self.folder(name, version) / MANIFEST_FILE
        try:
            return Manifest.model_validate_json(path.read_bytes())
        except FileNotFoundError as error:
            raise StorageError(
                f"model {name!r} has no version {version}: published are {self.versions(name)}"
            ) from error
        except ValidationError as error:
            raise StorageError(f"{str(path)!r} is not a manifest: publish the version again") from error

    def verify(self, name: str, version: int) -> None:
        """Compare every file of a version with its sha256.

        Raises:
            StorageError: the version is not there, or a file in it is missing or was changed.
        """
        for file, sha256 in self.manifest(name, version).files.items():
            read_verified(self.folder(name, version) / file, sha256)

    def fetch(self, name: str, version: int, target: UPath) -> Manifest:
        """Copy a version's files into a local folder, each compared with its sha256; raises as ``verify``."""
        manifest = self.manifest(name, version)
        target.mkdir(parents=True, exist_ok=True)
        for file, sha256 in manifest.files.items():
            (target / file).write_bytes(read_verified(self.folder(name, version) / file, sha256))
        return manifest

    def _aliases(self, name: str) -> dict[str, int]:
        path = self._root / name / ALIASES_FILE
        return json.loads(path.read_bytes()) if path.exists() else {}


def _copy(files: UPath, target: UPath) -> None:
    target.mkdir(parents=True)
    for file in files.iterdir():
        file.copy(target / file.name)


def _renamed(staged: UPath, target: UPath) -> bool:
    """Whether ``staged`` is ``target`` now; not if another publisher was faster."""
    try:
        staged.rename(target)
    except OSError:
        if target.exists():
            return False
        raise
    return True


def _remove(folder: UPath) -> None:
    for file in folder.iterdir() if folder.exists() else ():
        file.unlink()
    folder.rmdir()
