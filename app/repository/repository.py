"""Versions of models in storage: ``models/<name>/<version>/``, each complete or absent."""

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress

from pydantic import ValidationError
from upath import UPath

from app.config import Role
from app.errors import StorageError
from app.import_string import did_you_mean
from app.repository.aliases import ALIASES_FILE, Alias, Aliases
from app.repository.manifest import Manifest, ModelCard
from app.repository.triton import BACKENDS, CONFIG_FILE, config_of
from app.repository.version import add_version, check_files, is_published, read_manifest, staging, withdraw
from app.shared_files import Result, change, exclusive, map_concurrently, read
from app.storage import is_plain_name, list_names, write_atomically

DAMAGED = f"damaged {ALIASES_FILE}"


@dataclass(frozen=True)
class ListedVersion:
    """A published version in the list of all versions."""

    name: str
    version: int
    aliases: tuple[str, ...]
    """``DAMAGED`` if the model's alias file is not valid."""

    manifest: Manifest | None
    """None if the version was changed after publication."""


class Repository:
    """The models under a root of storage that ``open_storage`` returned."""

    def __init__(self, storage: UPath) -> None:
        self._root = storage / "models"

    def names(self) -> list[str]:
        """Return the names of the models that have a version."""
        return [name for name, newest in self._for_all_models(self._newest).items() if newest is not None]

    def list_versions(self) -> list[ListedVersion]:
        """List every published version of every model, by name and number."""
        numbers = {name: found for name, found in self._for_all_models(self._numbers).items() if found}
        aliases = dict(zip(numbers, map_concurrently(self._root, self._aliases_or_none, numbers), strict=True))

        def listed(name: str, number: int) -> ListedVersion | None:
            try:
                manifest = read_manifest(self.folder(name, number))
            except FileNotFoundError:  # it is being published, or was just deleted
                return None
            except StorageError:
                manifest = None
            known = aliases[name]
            return ListedVersion(name, number, (DAMAGED,) if known is None else tuple(known.of(number)), manifest)

        versions = [(name, number) for name, found in numbers.items() for number in found]
        return list(filter(None, map_concurrently(self._root, lambda version: listed(*version), versions)))

    def versions(self, name: str) -> list[int]:
        """Return the published versions of a model, ascending. Raises StorageError if there are none."""
        if published := self._published(name):
            return published
        raise self._no_model(name)

    def folder(self, name: str, version: int) -> UPath:
        """Return the folder of a version."""
        return self._folder_of(name) / str(version)

    def manifest(self, name: str, version: int, seal: str | None = None) -> Manifest:
        """Return the manifest of a version.

        Args:
            seal: the seal of the expected manifest; None accepts any.

        Raises:
            StorageError: the manifest is missing, was changed, or has another seal.
        """
        try:
            manifest = read_manifest(self.folder(name, version))
        except FileNotFoundError as error:
            raise self._no_version(name, version) from error
        if seal not in (None, manifest.seal):
            raise StorageError(
                f"model {name!r}, version {version}, was replaced: its manifest's sha256 is {manifest.seal[:12]}…, "
                f"expected {seal[:12]}…; deploy it again"
            ).of("version.changed")
        return manifest

    def publish(self, name: str, files: UPath, card: ModelCard) -> Manifest:
        """Publish the files of a folder as the next version, atomically, and return its manifest.

        Concurrent publishers get different numbers. A number is never reused, even if its version is deleted.
        """
        manifest = add_version(self._folder_of(name), files, card, lambda: self._next_number(name))
        self._write_config(name)
        return manifest

    def aliases(self, name: str) -> Aliases:
        """Return the aliases of a model. Raises StorageError if their file is not valid any more."""
        return self._parsed_aliases(name, read(self._folder_of(name) / ALIASES_FILE) or b"")

    def production(self, name: str) -> int:
        """Return the version in production. Raises StorageError if there is none."""
        version = self.aliases(name).production
        if version is None:
            raise StorageError(
                f"model {name!r} has no version in production in {str(self._root)!r} "
                f"(models there: {', '.join(self.names()) or 'none'}): 'rayloom submit compile RECIPE' makes one"
            ).of("production.none")
        return version

    def candidate(self, name: str, alias: Role) -> int:
        """Return the version that is the canary or the shadow. Raises StorageError if there is none."""
        version: int | None = getattr(self.aliases(name), alias)
        if version is None:
            raise StorageError(
                f"model {name!r} has no {alias}: run 'rayloom models promote {name} VERSION --alias {alias}', or name "
                f"one with serve.{alias}.version (published are {self.versions(name)})"
            ).of("candidate.none")
        return version

    def current(self, name: str) -> int:
        """Return the version in production, else the newest. Raises StorageError if there is none."""
        if current := self.aliases(name).production or self._newest(name):
            return current
        raise self._no_model(name)

    def promote(self, name: str, version: int, alias: Alias = "production") -> Aliases:
        """Move an alias to a version, and return the model's aliases. Raises StorageError if it is not published."""
        self._require(name, version)

        def promoted(aliases: Aliases) -> Aliases:
            # A deletion may have begun since the check above.
            if version in aliases.deleted:
                raise StorageError(f"model {name!r}, version {version}, is being deleted: promote another").of(
                    "version.being_deleted"
                )
            return aliases.promoted(version, alias)

        self._change_aliases(name, promoted)
        self._write_config(name)
        return self.aliases(name)

    def rollback(self, name: str) -> Aliases:
        """Return the previous version to production. A second rollback undoes the first.

        Raises:
            StorageError: no other version was in production before.
        """
        previous = self.aliases(name).previous
        if previous is None:
            raise StorageError(
                f"model {name!r} had no other version in production before (published are "
                f"{self.versions(name)}): promote one"
            ).of("production.no_previous")
        return self.promote(name, previous)

    def delete(self, name: str, version: int) -> None:
        """Delete a version. Raises StorageError if it does not exist, or if it has an alias."""
        self._require(name, version)

        def without(aliases: Aliases) -> Aliases:
            if roles := aliases.of(version):
                raise StorageError(
                    f"model {name!r}, version {version}, is {' and '.join(roles)}: promote another version first"
                ).of("version.in_use")
            return aliases.without(version)

        self._change_aliases(name, without)  # from here on it cannot be promoted
        withdraw(self.folder(name, version))
        self._write_config(name)

    def verify(self, name: str, version: int, seal: str | None = None) -> Manifest:
        """Compare every file of a version with its sha256, and return its manifest.

        Raises:
            StorageError: as in ``manifest``, or files are missing, changed or unexpected; the message names each.
        """
        manifest = self.manifest(name, version, seal)
        check_files(self.folder(name, version), manifest.files)
        return manifest

    def verify_config(self, name: str) -> None:
        """Compare a model's ``config.pbtxt`` with its manifest. Raises StorageError if they differ."""
        if self._config(name) != self._expected_config(name):
            path = self._folder_of(name) / CONFIG_FILE
            raise StorageError(
                f"{str(path)!r} was changed: promote a version, even the same one, and it is written again"
            ).of("pointer.changed")

    def fetch(
        self, name: str, version: int, target: UPath, exclude: Collection[str] = (), seal: str | None = None
    ) -> Manifest:
        """Copy a version's files into an empty local folder, and compare each with its sha256.

        Args:
            exclude: files that are neither copied nor compared.

        Raises:
            StorageError: as ``verify``.
        """
        manifest, folder = self.manifest(name, version, seal), self.folder(name, version)
        files = {file: sha256 for file, sha256 in manifest.files.items() if file not in exclude}
        target.mkdir(parents=True, exist_ok=True)

        def copy(file: str) -> None:
            with suppress(FileNotFoundError):  # check_files reports missing files
                folder.fs.get_file((folder / file).path, str(target / file))

        map_concurrently(folder, copy, files)
        # The copies are compared, so the engine opens what was verified.
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
            ).of("triton.engine")
        model = target / name
        if model.exists():
            raise StorageError(f"{str(model)!r} is there already: remove it, or give another folder").of("folder.taken")
        with staging(target) as staged:
            self.fetch(name, version, staged / str(version))
            (staged / CONFIG_FILE).write_text(config, encoding="utf-8")
            staged.rename(model)
        return model

    def _folder_of(self, name: str) -> UPath:
        if not is_plain_name(name):
            raise StorageError(f"{name!r} is not the name of a model: 'rayloom models list' shows them").of(
                "model.name"
            )
        return self._root / name

    def _numbers(self, name: str) -> list[int]:
        """Return the numbers of versions, including those that are being published."""
        return sorted(int(entry) for entry in list_names(self._folder_of(name)) if entry.isdecimal())

    def _published(self, name: str) -> list[int]:
        numbers = self._numbers(name)
        published = map_concurrently(self._root, lambda number: is_published(self.folder(name, number)), numbers)
        return list(compress(numbers, published))

    def _newest(self, name: str) -> int | None:
        """Return the last published version; None if there is none. Reads no version before it."""
        numbers = reversed(self._numbers(name))
        return next((number for number in numbers if is_published(self.folder(name, number))), None)

    def _for_all_models(self, work: Callable[[str], Result]) -> dict[str, Result]:
        """Call ``work`` with the name of each model's folder. Return the results by name, sorted."""
        names = sorted(filter(is_plain_name, list_names(self._root)))
        return dict(zip(names, map_concurrently(self._root, work, names), strict=True))

    def _next_number(self, name: str) -> int:
        return max([*self._numbers(name), *self.aliases(name).deleted], default=0) + 1

    def _require(self, name: str, version: int) -> None:
        if not is_published(self.folder(name, version)):
            raise self._no_version(name, version)

    def _no_model(self, name: str) -> StorageError:
        known = self.names()
        way_out = did_you_mean(name, known) if known else "no model is there: 'rayloom submit compile RECIPE' makes one"
        return StorageError(f"{str(self._root)!r} has no model {name!r}; {way_out}").of("model.unknown")

    def _no_version(self, name: str, version: int) -> StorageError:
        return StorageError(f"model {name!r} has no version {version}: published are {self.versions(name)}").of(
            "version.unknown"
        )

    def _aliases_or_none(self, name: str) -> Aliases | None:
        """Return the aliases of a model; None if their file is not valid."""
        try:
            return self.aliases(name)
        except StorageError:
            return None

    def _parsed_aliases(self, name: str, content: bytes) -> Aliases:
        try:
            return Aliases.model_validate_json(content or b"{}")
        except ValidationError as error:
            path = self._folder_of(name) / ALIASES_FILE
            raise StorageError(f"{str(path)!r} was changed: remove it, and promote a version again").of(
                "file.changed"
            ) from error

    def _change_aliases(self, name: str, changed: Callable[[Aliases], Aliases]) -> None:
        def change_content(content: bytes) -> bytes:
            return changed(self._parsed_aliases(name, content)).model_dump_json(exclude_defaults=True).encode()

        change(self._folder_of(name) / ALIASES_FILE, change_content)

    def _expected_config(self, name: str) -> str | None:
        """Return the configuration of the version in production, else of the newest."""
        version = self.aliases(name).production or self._newest(name)
        return config_of(self.manifest(name, version)) if version else None

    def _config(self, name: str) -> str | None:
        content = read(self._folder_of(name) / CONFIG_FILE)
        return None if content is None else content.decode(errors="replace")

    def _write_config(self, name: str) -> None:
        """Write ``config.pbtxt``. Repeat that if production changes meanwhile."""
        path = self._folder_of(name) / CONFIG_FILE
        # A damaged version has no configuration.
        with suppress(StorageError), exclusive(path.parent):
            while (expected := self._expected_config(name)) != self._config(name):
                if expected is None:
                    path.unlink(missing_ok=True)
                else:
                    write_atomically(path, expected.encode(), durable=True)
