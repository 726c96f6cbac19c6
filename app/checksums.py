"""sha256 of files, kept beside them as ``sha256sum`` writes and reads it."""

import hashlib

from upath import UPath

from app.errors import StorageError

CHECKSUMS_FILE = "SHA256SUMS"


def sha256_of(content: bytes) -> str:
    """The hexadecimal sha256 of ``content``."""
    return hashlib.sha256(content).hexdigest()


def checksums_of(folder: UPath) -> dict[str, str]:
    """The sha256 of every file of ``folder``, by name."""
    return {file.name: sha256_of(file.read_bytes()) for file in sorted(folder.iterdir(), key=str) if file.is_file()}


def read_verified(file: UPath, sha256: str) -> bytes:
    """The content of ``file``. Raises StorageError if it is missing, or its sha256 is another."""
    try:
        content = file.read_bytes()
    except FileNotFoundError as error:
        raise StorageError(f"{str(file)!r} is missing: make it again") from error
    if (given := sha256_of(content)) != sha256:
        raise StorageError(
            f"{str(file)!r} was changed: its sha256 is {given[:12]}…, expected {sha256[:12]}…; make it again"
        )
    return content


def write_checksums(folder: UPath) -> None:
    """Write the checksum of every file of ``folder``."""
    lines = [f"{sha256}  {name}\n" for name, sha256 in checksums_of(folder).items() if name != CHECKSUMS_FILE]
    (folder / CHECKSUMS_FILE).write_text("".join(lines), encoding="utf-8")


def verify_checksums(folder: UPath) -> None:
    """Compare every file of ``folder`` with its checksum.

    Raises:
        StorageError: there are no checksums, or a file is missing or differs; it is named.
    """
    path = folder / CHECKSUMS_FILE
    if not path.exists():
        raise StorageError(f"{str(folder)!r} has no {CHECKSUMS_FILE}: it is not a folder that Rayloom wrote whole")
    for line in path.read_text(encoding="utf-8").splitlines():
        sha256, _, name = line.partition("  ")
        read_verified(folder / name, sha256)
