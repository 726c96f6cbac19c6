"""sha256 checksums of files, in the format of ``sha256sum``, and of the library's own code."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from upath import UPath

from app.errors import StorageError
from app.storage import ProgressCallback, is_plain_name, no_op, sync_folder, write_atomically

CHECKSUMS_FILE = "SHA256SUMS"
_PIECE_BYTES = 2**22


def sha256_of(content: bytes) -> str:
    """Return the hexadecimal sha256 of ``content``."""
    return hashlib.sha256(content).hexdigest()


def sha256_of_file(path: Path | UPath, on_progress: ProgressCallback = no_op) -> str:
    """Return the hexadecimal sha256 of a file, which is read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            on_progress()
    return digest.hexdigest()


def checksums_of(files: Iterable[Path | UPath], on_progress: ProgressCallback = no_op) -> dict[str, str]:
    """Return the sha256 of each file, by name."""
    return {path.name: sha256_of_file(path, on_progress) for path in sorted(files, key=str)}


def read_verified(file: UPath, sha256: str) -> bytes:
    """Return the content of ``file``. Raise StorageError if it is missing or was changed."""
    try:
        content = file.read_bytes()
    except FileNotFoundError as error:
        raise missing_file(file) from error
    if (given := sha256_of(content)) != sha256:
        raise _changed(file, given, sha256)
    return content


def write_checksums(folder: UPath, sums: Mapping[str, str] | None = None) -> None:
    """Write the checksums of all files of ``folder``, or the given ones, atomically.

    They make the folder whole, so its files are on the disk before them, and they are when this returns.
    """
    if sums is None:
        sums = checksums_of(file for file in folder.iterdir() if file.is_file() and file.name != CHECKSUMS_FILE)
    sync_folder(folder)
    write_atomically(folder / CHECKSUMS_FILE, checksum_lines(sums), durable=True)


def checksum_lines(sums: Mapping[str, str]) -> bytes:
    """Return what ``sha256sum`` prints for files with these checksums, sorted by name."""
    return "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(sums.items())).encode()


def read_checksums(folder: UPath) -> dict[str, str]:
    """Return the sha256 of each file of ``folder``, by name. Raises StorageError if there are none."""
    try:
        content = (folder / CHECKSUMS_FILE).read_bytes()
    except FileNotFoundError as error:
        raise StorageError(f"{str(folder)!r} has no {CHECKSUMS_FILE}: it is not a folder that Rayloom wrote whole").of(
            "checksums.missing"
        ) from error
    lines = content.decode(errors="replace").splitlines()
    sums = {name: sha256 for sha256, _, name in (line.partition("  ") for line in lines)}
    if odd := [name for name in sums if not is_plain_name(name)]:
        raise StorageError(
            f"{str(folder / CHECKSUMS_FILE)!r} names {odd[0]!r}, not a file of its folder: write the checksums again"
        ).of("path.outside")
    return sums


class VerifiedFolder:
    """A folder with checksums, from which only files that match theirs are read."""

    def __init__(self, path: UPath) -> None:
        """Raise StorageError if the folder has no checksums."""
        self.path = path
        self._sums = read_checksums(path)

    def __contains__(self, name: str) -> bool:
        """Return True if the file ``name`` has a checksum."""
        return name in self._sums

    def sha256_of(self, name: str) -> str:
        """Return the checksum of the file ``name``. Raises StorageError if there is none."""
        if name not in self._sums:
            raise StorageError(f"{str(self.path)!r} has no checksum of {name!r}: it was changed").of(
                "checksums.incomplete"
            )
        return self._sums[name]

    def read(self, name: str) -> bytes:
        """Read the file ``name``. Raises StorageError if it has no checksum, is missing or was changed."""
        return read_verified(self.path / name, self.sha256_of(name))


def verify_checksums(folder: UPath, on_progress: ProgressCallback = no_op) -> None:
    """Compare every file of ``folder`` with its checksum.

    Raises:
        StorageError: there are no checksums, or a file is missing, was changed or has none. The message names it.
    """
    path, expected = folder / CHECKSUMS_FILE, read_checksums(folder)
    files = {file.name: file for file in folder.iterdir() if file.is_file() and file.name != CHECKSUMS_FILE}
    if missing := sorted(expected.keys() - files.keys()):
        raise missing_file(folder / missing[0])
    if unknown := sorted(files.keys() - expected.keys()):
        raise StorageError(f"{str(path)!r} does not name {unknown[0]!r}: one of them was changed; make it again").of(
            "checksums.incomplete"
        )
    for name, given in checksums_of(files.values(), on_progress).items():
        if given != expected[name]:
            raise _changed(files[name], given, expected[name])


def missing_file(file: UPath) -> StorageError:
    """Return the error for a missing file that has a checksum."""
    return StorageError(f"{str(file)!r} is missing: make it again").of("file.missing")


def _changed(file: UPath, given: str, expected: str) -> StorageError:
    return StorageError(
        f"{str(file)!r} was changed: its sha256 is {given[:12]}…, expected {expected[:12]}…; make it again"
    ).of("file.changed")


def code_revision(*folders: str) -> str:
    """Return the sha256 over the names and contents of the library's Python files, or of those in some ``folders``.

    Jobs run in an uploaded copy of the code, which has no git history.
    """
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted(file for folder in folders or [""] for file in (root / folder).rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return f"sha256:{digest.hexdigest()}"
