"""Versions of models in storage: ``models/<name>/<version>/``, whole or not there at all."""

import secrets
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress

from pydantic import ValidationError
from upath import UPath

from app.conditional import Result, change, exclusive, map_concurrently, read
from app.config import Role
from app.errors import StorageError
from app.repository.aliases import ALIASES_FILE, Alias, Aliases
from app.repository.manifest import Manifest, ModelCard
from app.repository.triton import BACKENDS, CONFIG_FILE, config_of
from app.repository.version import add_version, check_files, is_published, read_manifest, remove, withdraw
from app.storage import list_names, write_atomically


@dataclass(frozen=True)
class ListedVersion:
    """A published version in the list of all versions."""

    name: str
    version: int
    aliases: tuple[str, ...]
    manifest: Manifest | None
    """None if the version was changed after publication."""


class Repository:
    """The models under a root of storage, which ``open_storage`` has opened."""

    def __init__(self, storage: UPath) -> None:
        self._root = storage / "models"

    def names(self) -> list[str]:
        """The models that have a version."""
        return [name for name, newest in self._of_each_model(self._newest).items() if newest is not None]

    def list_versions(self) -> list[ListedVersion]:
        """List every published version of every model, by name and number. Raises StorageError as ``aliases`` does."""
        numbers = {name: found for name, found in self._of_each_model(self._numbers).items() if found}
        aliases = dict(zip(numbers, map_concurrently(self._root, self.aliases, numbers), strict=True))

        def listed(name: str, number: int) -> ListedVersion | None:
            try:
                manifest = read_manifest(self.folder(name, number))
            except FileNotFoundError:  # it is being published, or was just deleted
                return None
            except StorageError:
                manifest = None
            return ListedVersion(name, number, tuple(aliases[name].of(number)), manifest)

        versions = [(name, number) for name, found in numbers.items() for number in found]
        return list(filter(None, map_concurrently(self._root, lambda version: listed(*version), versions)))

    def versions(self, name: str) -> list[int]:
        """The published versions of a model, ascending. Raises StorageError if there are none."""
        if published := self._published(name):
            return published
        raise self._no_model(name)

    def folder(self, name: str, version: int) -> UPath:
        """Where a version lies."""
        return self._root / name / str(version)

    def manifest(self, name: str, version: int) -> Manifest:
        """The manifest of a version. Raises StorageError if there is none, or it was changed."""
        try:
            return read_manifest(self.folder(name, version))
        except FileNotFoundError as error:
            raise self._no_version(name, version) from error

    def publish(self, name: str, files: UPath, card: ModelCard) -> Manifest:
        """Add the files of a folder as the next version, all at once, and return its manifest.

        Publishers at once get a number each; a number is not given twice, even if its version is deleted.
        """
        manifest = add_version(self._root / name, files, card, lambda: self._next_number(name))
        self._write_config(name)
        return manifest

    def aliases(self, name: str) -> Aliases:
        """The aliases of a model. Raises StorageError if their file was changed by hand and is none any more."""
        return self._parsed_aliases(name, read(self._root / name / ALIASES_FILE) or b"")

    def production(self, name: str) -> int:
        """The version in production. Raises StorageError if there is none."""
        version = self.aliases(name).production
        if version is None:
            raise StorageError(
                f"model {name!r} has no version in production in {str(self._root)!r} "
                f"(models there: {', '.join(self.names()) or 'none'}): run jobs.compile first"
            )
        return version

    def candidate(self, name: str, alias: Role) -> int:
        """The version that is the canary or the shadow. Raises StorageError if there is none."""
        version: int | None = getattr(self.aliases(name), alias)
        if version is None:
            raise StorageError(
                f"model {name!r} has no {alias}: run 'rayloom models promote {name} VERSION --alias {alias}', or name "
                f"one with serve.{alias}.version (published are {self.versions(name)})"
            )
        return version

    def current(self, name: str) -> int:
        """The version in production, else the newest. Raises StorageError if there is none."""
        if current := self.aliases(name).production or self._newest(name):
            return current
        raise self._no_model(name)

    def promote(self, name: str, version: int, alias: Alias = "production") -> Aliases:
        """Give a version an alias and return all of the model. Raises StorageError if it is not published."""
        self._require(name, version)

        def promoted(aliases: Aliases) -> Aliases:
            if version in aliases.deleted:
                raise StorageError(f"model {name!r}, version {version}, is being deleted: promote another")
            return aliases.promoted(version, alias)

        self._change_aliases(name, promoted)
        self._write_config(name)
        return self.aliases(name)

    def rollback(self, name: str) -> Aliases:
        """Put what was in production before into production again; once more, and it is as it was.

        Raises:
            StorageError: nothing was in production before.
        """
        previous = self.aliases(name).previous
        if previous is None:
            raise StorageError(
                f"model {name!r} had no other version in production before (published are "
                f"{self.versions(name)}): promote one"
            )
        return self.promote(name, previous)

    def delete(self, name: str, version: int) -> None:
        """Remove a version for good. Raises StorageError if it is not there, or an alias names it."""
        self._require(name, version)

        def without(aliases: Aliases) -> Aliases:
            if named := aliases.of(version):
                raise StorageError(
                    f"model {name!r}, version {version}, is {' and '.join(named)}: promote another version first"
                )
            return aliases.without(version)

        self._change_aliases(name, without)  # from here on nobody can promote it
        withdraw(self.folder(name, version))
        self._write_config(name)

    def verify(self, name: str, version: int) -> Manifest:
        """Compare every file of a version with its sha256, and return its manifest.

        Raises:
            StorageError: the version is not there, or a file in it is missing, was changed or does not belong to it;
                each is named.
        """
        manifest = self.manifest(name, version)
        check_files(self.folder(name, version), manifest.files)
        return manifest

    def verify_config(self, name: str) -> None:
        """Compare a model's ``config.pbtxt`` with what its manifest says. Raises StorageError if it differs."""
        if self._config(name) != self._wanted_config(name):
            path = self._root / name / CONFIG_FILE
            raise StorageError(
                f"{str(path)!r} was changed: promote a version, be it the same one, and it is written anew"
            )

    def fetch(self, name: str, version: int, target: UPath, besides: Collection[str] = ()) -> Manifest:
        """Copy a version's files into an empty local folder, and compare each with its sha256.

        Args:
            besides: files that are neither copied nor compared.

        Raises:
            StorageError: as ``verify``.
        """
        manifest, folder = self.manifest(name, version), self.folder(name, version)
        files = {file: sha256 for file, sha256 in manifest.files.items() if file not in besides}
        target.mkdir(parents=True, exist_ok=True)

        def copy(file: str) -> None:
            with suppress(FileNotFoundError):  # check_files reports missing files
                folder.fs.get_file((folder / file).path, str(target / file))

        map_concurrently(folder, copy, files)
        check_files(folder, files, read_from=target)
        return manifest

    def export_to_triton(self, name: str, version: int, target: UPath) -> UPath:
        """Export a version as a model repository that ``tritonserver --model-repository`` takes; return its model.

        The files are verified.

        Args:
            target: a folder on this machine.

        Raises:
            StorageError: the version is not there or was changed, Triton has no backend for its engine, or ``target``
                has the model already.
        """
        manifest = self.manifest(name, version)
        config = config_of(manifest)
        if config is None:
            raise StorageError(
                f"model {name!r}, version {version}, is of engine {manifest.engine_key.engine}, which Triton does not "
                f"run: export a version of {', '.join(BACKENDS)}"
            )
        model, staged = target / name, target / f".{secrets.token_hex(4)}.tmp"
        if model.exists():
            raise StorageError(f"{str(model)!r} is there already: remove it, or give another folder")
        try:
            self.fetch(name, version, staged / str(version))
            (staged / CONFIG_FILE).write_text(config, encoding="utf-8")
            staged.rename(model)
        except BaseException:
            remove(staged)
            raise
        return model

    def _numbers(self, name: str) -> list[int]:
        """Of versions, and of what publishers have begun."""
        return sorted(int(entry) for entry in list_names(self._root / name) if entry.isdecimal())

    def _published(self, name: str) -> list[int]:
        numbers = self._numbers(name)
        published = map_concurrently(self._root, lambda number: is_published(self.folder(name, number)), numbers)
        return list(compress(numbers, published))

    def _newest(self, name: str) -> int | None:
        """Return the last published version; None if there is none. Reads no version before it."""
        numbers = reversed(self._numbers(name))
        return next((number for number in numbers if is_published(self.folder(name, number))), None)

    def _of_each_model(self, work: Callable[[str], Result]) -> dict[str, Result]:
        """Call ``work`` with the name of each model's folder. Return the results by name, sorted."""
        names = sorted(list_names(self._root))
        return dict(zip(names, map_concurrently(self._root, work, names), strict=True))

    def _next_number(self, name: str) -> int:
        return max([*self._numbers(name), *self.aliases(name).deleted], default=0) + 1

    def _require(self, name: str, version: int) -> None:
        if not is_published(self.folder(name, version)):
            raise self._no_version(name, version)

    def _no_model(self, name: str) -> StorageError:
        return StorageError(
            f"{str(self._root)!r} has no model {name!r}: models there are {', '.join(self.names()) or 'none'}"
        )

    def _no_version(self, name: str, version: int) -> StorageError:
        return StorageError(f"model {name!r} has no version {version}: published are {self.versions(name)}")

    def _parsed_aliases(self, name: str, content: bytes) -> Aliases:
        try:
            return Aliases.model_validate_json(content or b"{}")
        except ValidationError as error:
            path = self._root / name / ALIASES_FILE
            raise StorageError(f"{str(path)!r} was changed: remove it, and promote a version again") from error

    def _change_aliases(self, name: str, changed: Callable[[Aliases], Aliases]) -> None:
        def change_content(content: bytes) -> bytes:
            return changed(self._parsed_aliases(name, content)).model_dump_json(exclude_defaults=True).encode()

        change(self._root / name / ALIASES_FILE, change_content)

    def _wanted_config(self, name: str) -> str | None:
        """The configuration of the version in production, else of the newest."""
        shown = self.aliases(name).production or self._newest(name)
        return config_of(self.manifest(name, shown)) if shown else None

    def _config(self, name: str) -> str | None:
        content = read(self._root / name / CONFIG_FILE)
        return None if content is None else content.decode(errors="replace")

    def _write_config(self, name: str) -> None:
        """Make ``config.pbtxt`` say what is so; again, if that was changed while it was written."""
        path = self._root / name / CONFIG_FILE
        with suppress(StorageError), exclusive(path.parent):  # of a damaged version there is nothing to say
            while (wanted := self._wanted_config(name)) != self._config(name):
                if wanted is None:
                    path.unlink(missing_ok=True)
                else:
                    write_atomically(path, wanted.encode())
