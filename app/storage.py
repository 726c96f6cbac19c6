"""Storage: one root for runs and models, on a local disk or on any file system of fsspec."""

import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Self, cast

from fsspec.callbacks import Callback
from pydantic import AfterValidator
from upath import UPath

from app.errors import StorageError
from app.uris import PERCENT_ENCODE, holds_secret, without_secrets

HOME = Path(os.environ.get("RAYLOOM_HOME", "~/.rayloom")).expanduser()
"""Rayloom's own folder on this machine: the local cluster's state and the default storage."""


_CACHE_LISTINGS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl")
"""Protocols whose drivers cache listings, which hides writes of other processes. Other drivers reject the option."""

ProgressCallback = Callable[[], None]
"""Called after each piece that is read or written, so that slow storage is not taken for a hang."""


_READ_AHEAD_BYTES = 2**23
"""Bytes of read-ahead on S3. The driver's default of 50 MiB is almost a whole unit of a source."""
_COPIED_AT_ONCE = 2**24
"""Bytes of a file that are in memory while it is copied."""
_VERSION_KEYS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")
"""What drivers of fsspec call the version of a file, or the time of its last change."""


def no_op(*_: object) -> None:
    """Do nothing: the default of optional callbacks."""


def cache_folder(name: str) -> Path:
    """Return a cache of this machine, by name: in ``$RAYLOOM_CACHE``, else in ``~/.cache/rayloom``."""
    return Path(os.environ.get("RAYLOOM_CACHE") or "~/.cache/rayloom").expanduser() / name


def to_path(location: str | Path) -> UPath:
    """Return ``location`` as a path that shows writes of other processes at once.

    Create every path with this function, also from the string of another path: ``UPath(...)`` would cache listings.
    """
    path = UPath(location)
    if path.protocol not in _CACHE_LISTINGS:
        return path
    if path.protocol in ("s3", "s3a"):
        return UPath(location, use_listings_cache=False, default_block_size=_READ_AHEAD_BYTES)
    return UPath(location, use_listings_cache=False)


def version_of(entry: Mapping[str, Any]) -> str | None:
    """Return what changes with a file, from a driver's metadata. None: the driver lists nothing of the kind."""
    found = next((value for key in _VERSION_KEYS if (value := entry.get(key))), None)
    return None if found is None else str(found)


def open_storage(location: str | None) -> UPath:
    """Return the root of storage: ``location``, else ``$RAYLOOM_STORAGE``, else ``~/.rayloom/storage``.

    Raises:
        StorageError: the location holds a secret; the path is relative, so in a job it would lie in a copy that Ray
            deletes; or the protocol's driver is not installed.
    """
    location = location or os.environ.get("RAYLOOM_STORAGE") or str(HOME / "storage")
    if holds_secret(location):
        raise StorageError(
            f"storage {without_secrets(location)!r} was given with a secret, which would enter logs and results: give "
            "it in the environment of the cluster's nodes, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. "
            f"{PERCENT_ENCODE}"
        ).of("secret.in_storage", "storage")
    if "://" not in location and not Path(location).is_absolute():
        raise StorageError(
            f"storage is {location!r}, a relative path: a job runs in a copy of the working directory that Ray "
            "deletes; give an absolute path or a URI such as s3://bucket/prefix"
        ).of("path.relative", "storage")
    try:
        root = to_path(location)
        root.exists()  # loads the protocol's driver
    except Exception as error:  # each protocol's driver has errors of its own
        raise StorageError(f"storage {location!r} cannot be opened ({error}): check the URI and its driver").of(
            "storage.not_opened", "storage"
        ) from error
    return root


def absolute_location(location: str) -> str:
    """Return ``location`` for a job. A relative path is resolved from the current folder."""
    return location if "://" in location else str(Path(location).expanduser().absolute())


def is_plain_name(name: str) -> bool:
    """Return whether ``name`` names one file or folder and cannot lead out of its parent folder.

    Names with a slash, a backslash, a colon or a control character are not plain, nor are ``.`` and ``..``.
    """
    return re.fullmatch(r"(?!\.{1,2}$)[^/\\:\x00-\x1f\x7f]{1,255}", name) is not None


def _check_plain(name: str) -> str:
    if not is_plain_name(name):
        raise ValueError(f"{name!r} is not the name of one file: a path would lead out of its folder")
    return name


PlainName = Annotated[str, AfterValidator(_check_plain)]
"""A name that is read from a file in storage and becomes a path on the reading machine."""


def is_local(path: UPath) -> bool:
    """Return True if ``path`` is on this machine, where a rename is atomic."""
    return path.protocol in ("", "file", "local")


def list_names(folder: UPath) -> list[str]:
    """List the names in a folder with one request, unordered. A missing folder has none."""
    try:
        entries: list[str] = folder.fs.ls(folder.path, detail=False)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [entry.rstrip("/").rpartition("/")[2] for entry in entries]


@contextmanager
def local_folder(folder: UPath) -> Iterator[Path]:
    """Yield ``folder`` itself if it is on a disk, else an empty temporary folder to upload from."""
    if is_local(folder):
        yield Path(folder.path)
        return
    with tempfile.TemporaryDirectory(prefix="rayloom-") as temporary:
        yield Path(temporary)


@contextmanager
def local_copy(folder: UPath, on_progress: ProgressCallback = no_op) -> Iterator[Path]:
    """Yield ``folder`` itself if it is on a disk, else a temporary copy."""
    with local_folder(folder) as local:
        if not is_local(folder):
            folder.fs.get(f"{folder.path}/", f"{local}/", recursive=True, callback=_ProgressReporter(on_progress))
        yield local


def link(source: UPath, target: UPath) -> None:
    """Give a file that never changes a second name in the same storage. Where that is impossible, copy it there."""
    try:
        if is_local(source):
            os.link(source.path, target.path)
        else:
            source.fs.cp_file(source.path, target.path)
    except FileExistsError:
        raise
    # File systems refuse links with various error numbers. A fault of the file itself also stops the copy.
    except (OSError, NotImplementedError):
        with source.open("rb") as given, target.open("wb") as copied:
            shutil.copyfileobj(given, copied, _COPIED_AT_ONCE)


def upload(file: Path, target: UPath, on_progress: ProgressCallback = no_op) -> None:
    """Copy a file from this machine's disk into storage."""
    target.fs.put(str(file), target.path, callback=_ProgressReporter(on_progress))


def sync_folder(folder: UPath) -> None:
    """Wait until the files of a folder on a disk, and all names on the way to them, survive a power cut.

    Object stores keep what they have acknowledged.
    """
    if is_local(folder):
        sync_files(filter(Path.is_file, Path(folder.path).iterdir()))
        sync_names(Path(folder.path))


def sync_files(files: Iterable[Path]) -> None:
    """Wait until the content of files on a disk survives a power cut."""
    for file in files:
        _sync(file)


def sync_names(folder: Path) -> None:
    """Wait until the names in a folder, and its own name in each folder above, survive a power cut."""
    for place in (folder, *folder.parents):
        try:
            _sync(place)
        except OSError as error:
            # Some file systems sync no folders, and a folder of another user was there before.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
                raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: UPath, data: bytes, durable: bool = False) -> None:
    """Write ``data`` to ``path`` so that readers see the old or the new content, never a part.

    Object stores replace whole objects. A local file is written under a temporary name and renamed.

    Args:
        durable: return only when the content and its name survive a power cut.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if is_local(path):
        with stream_atomically(path, durable) as file:
            file.write(data)
    else:
        path.write_bytes(data)


@contextmanager
def stream_atomically(path: UPath, durable: bool = False) -> Iterator[BinaryIO]:
    """Yield a local file to write to. It becomes ``path`` when the block ends without an error.

    ``durable`` is as in ``write_atomically``.
    """
    if not is_local(path):
        with tempfile.NamedTemporaryFile(prefix="rayloom-") as temporary_file:
            yield cast(BinaryIO, temporary_file)
            temporary_file.flush()
            upload(Path(temporary_file.name), path)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # A random name, because process ids repeat on machines that share a disk.
    temporary = Path(path.path).with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.rename(path.path)
        if durable:
            sync_names(temporary.parent)
    finally:
        temporary.unlink(missing_ok=True)


class _ProgressReporter(Callback):  # type: ignore[misc]
    """Calls ``on_progress`` for each piece that fsspec copies, of every file of a folder."""

    def __init__(self, on_progress: ProgressCallback) -> None:
        super().__init__()
        self._on_progress = on_progress

    def call(self, *_: Any, **__: Any) -> None:
        self._on_progress()

    def branched(self, *_: Any, **__: Any) -> Self:
        return self
