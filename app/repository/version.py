"""The folder of a version: its files, and the manifest without which it does not exist."""

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError
from upath import UPath

from app.checksums import checksums_of, sha256_of
from app.errors import StorageError
from app.repository.manifest import Manifest, ModelCard
from app.shared_files import claim, read
from app.storage import is_local, sync_folder, sync_names, write_atomically

MANIFEST_FILE = "manifest.json"
SEAL_FILE = "manifest.sha256"
"""The manifest's own checksum, as ``sha256sum`` writes it."""

CLAIM_FILE = ".claim"
"""The first file that a publisher writes on an object store, to reserve the number."""

_ABANDONED_S = 3600.0
"""Time since the last write after which a temporary folder counts as abandoned. Writing a file in it renews it."""

_TEMPORARY = re.compile(r"\.(.+\.)?[0-9a-f]{8}\.tmp")
"""Names of temporary folders, and of the files of ``write_atomically``. Others' files are left alone."""

_NOT_IN_MANIFEST = (MANIFEST_FILE, SEAL_FILE, CLAIM_FILE)


def copy_files(files: UPath, folder: UPath) -> None:
    """Copy files into a version's folder. Raises StorageError if there are none, or if one is a folder."""
    given = _contents(files)
    if not given or not all(file.is_file() for file in given):
        raise StorageError(
            f"{str(files)!r} has {sorted(file.name for file in given) or 'no files'}: a version takes files, no folders"
        ).of("version.folders")
    folder.mkdir(parents=True, exist_ok=True)
    for file in given:
        file.copy(folder / file.name)


def seal(folder: UPath, files: UPath, version: int, name: str, card: ModelCard) -> Manifest:
    """Write the manifest of ``files``, which turns their copies in ``folder`` into a version."""
    manifest = Manifest(
        **card.model_dump(),
        name=name,
        version=version,
        created=datetime.now(UTC),
        size_bytes=sum(file.stat().st_size for file in _contents(files)),
        # Of the source, so that a copy that went wrong does not match.
        files=checksums_of(_contents(files)),
    )
    content = manifest.model_dump_json(indent=1).encode()
    write_atomically(folder / SEAL_FILE, _seal_of(content))
    sync_folder(folder)
    # The manifest comes last, because a folder without it is no version.
    write_atomically(folder / MANIFEST_FILE, content, durable=True)
    return manifest.model_copy(update={"seal": sha256_of(content)})


def take_number(folder: UPath) -> bool:
    """Reserve a version's number on an object store. Return False if another publisher has it."""
    return claim(folder / CLAIM_FILE)


def is_published(folder: UPath) -> bool:
    """Return whether a folder is a version."""
    return (folder / MANIFEST_FILE).exists()


def read_manifest(folder: UPath) -> Manifest:
    """Return the manifest of a version.

    Raises:
        FileNotFoundError: the folder is not a version.
        StorageError: the manifest was changed, or is from another release of Rayloom.
    """
    path = folder / MANIFEST_FILE
    content = read(path)
    if content is None:
        raise FileNotFoundError(str(path))
    if read(folder / SEAL_FILE) != _seal_of(content):
        raise StorageError(f"{str(path)!r} or {SEAL_FILE} beside it was changed: publish the version again").of(
            "version.changed"
        )
    try:
        return Manifest.model_validate_json(content).model_copy(update={"seal": sha256_of(content)})
    except ValidationError as error:
        reason = error.errors()[0]
        where = ".".join(map(str, reason["loc"]))
        raise StorageError(
            f"{str(path)!r} is damaged or of another release of Rayloom ({where}: {reason['msg']}): publish the "
            "version again"
        ).of("manifest.damaged") from error


def check_files(folder: UPath, files: Mapping[str, str], read_from: UPath | None = None) -> None:
    """Compare a version's files with their sha256.

    Args:
        files: the sha256 of each file.
        read_from: a copy of the version to read instead.

    Raises:
        StorageError: a file is missing, was changed, or does not belong to the version; each is named.
    """
    if damages := list(_damages(folder, files, read_from or folder)):
        raise StorageError("; ".join(damages)).of("version.changed")


def _damages(folder: UPath, files: Mapping[str, str], read_from: UPath) -> Iterator[str]:
    found = {file.name: file for file in _contents(read_from)}
    for name in sorted(files.keys() - found.keys()):
        yield f"{str(folder / name)!r} is missing: publish the version again"
    for name in sorted(found.keys() - files.keys()):
        yield f"{str(folder / name)!r} is not in the manifest: remove it"
    for name, sha256 in checksums_of(found[name] for name in files.keys() & found.keys()).items():
        if sha256 != (expected := files[name]):
            yield (
                f"{str(folder / name)!r} was changed: its sha256 is {sha256[:12]}…, expected {expected[:12]}…; "
                "publish the version again"
            )


def withdraw(folder: UPath) -> None:
    """Remove a version. Readers stop seeing it at once, before its files are deleted."""
    if is_local(folder):
        aside = _temporary_in(folder.parent)
        try:
            folder.rename(aside)
        except FileNotFoundError:  # another process removes it
            return
        remove_abandoned(folder.parent)
        folder = aside
    # An object store cannot rename, so there the manifest goes first.
    (folder / MANIFEST_FILE).unlink(missing_ok=True)
    remove(folder)


@contextmanager
def staging(parent: UPath) -> Iterator[UPath]:
    """Yield a path on a local disk for a folder that becomes visible in ``parent`` when the block renames it.

    Remove it if the block fails, and remove what killed processes have left.
    """
    remove_abandoned(parent)
    staged = _temporary_in(parent)
    try:
        yield staged
    except BaseException:
        remove(staged)
        raise


def _temporary_in(parent: UPath) -> UPath:
    return parent / f".{secrets.token_hex(4)}.tmp"


def remove_abandoned(parent: UPath) -> None:
    """Remove what killed processes left on a local disk: folders and files without a write for an hour."""
    for left in filter(lambda path: _TEMPORARY.fullmatch(path.name), parent.glob(".*.tmp")):
        with suppress(FileNotFoundError):  # another process has removed it, or its writer has finished
            newest = max(path.stat().st_mtime for path in (left, *left.rglob("*")))
            if time.time() - newest > _ABANDONED_S:
                remove(left)


def remove(folder: UPath) -> None:
    """Remove a folder of files, if it exists."""
    if folder.exists():
        folder.fs.rm(folder.path, recursive=True)


def _contents(folder: UPath) -> list[UPath]:
    return [file for file in folder.iterdir() if file.name not in _NOT_IN_MANIFEST]


def _seal_of(manifest: bytes) -> bytes:
    return f"{sha256_of(manifest)}  {MANIFEST_FILE}\n".encode()


def add_version(model: UPath, files: UPath, card: ModelCard, next_number: Callable[[], int]) -> Manifest:
    """Publish the files as a version, under the first number that no other publisher takes meanwhile.

    On a local disk the version is staged and renamed. An object store cannot rename, so there the publisher claims a
    number atomically, and writes the manifest last. Readers never see a part of a version, however its publisher ends.
    """
    add = _add_by_rename if is_local(model) else _add_in_place
    return add(model, files, card, next_number)


def _add_by_rename(model: UPath, files: UPath, card: ModelCard, next_number: Callable[[], int]) -> Manifest:
    with staging(model) as staged:
        copy_files(files, staged)
        while True:
            # The manifest has the number, so each attempt seals the version again.
            manifest = seal(staged, files, next_number(), model.name, card)
            if _rename(staged, model / str(manifest.version)):
                sync_names(Path(model.path))
                return manifest


def _add_in_place(model: UPath, files: UPath, card: ModelCard, next_number: Callable[[], int]) -> Manifest:
    # Until no other publisher is faster: each attempt sees the numbers that are taken by then.
    while not take_number(folder := model / str(next_number())):
        pass
    try:
        copy_files(files, folder)
        return seal(folder, files, int(folder.name), model.name, card)
    except BaseException:
        withdraw(folder)
        raise


def _rename(staged: UPath, target: UPath) -> bool:
    """Rename ``staged`` to ``target``. Return False if another publisher was faster."""
    try:
        staged.rename(target)
    except OSError:
        if target.exists():
            return False
        raise
    return True
