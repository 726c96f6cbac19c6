"""Shards as memory-mapped files on this machine: in place on a disk, else copies in a cache of bounded size."""

import fcntl
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from app.checksums import sha256_of_file
from app.data.shards import OpenShard, Shard, require_intact
from app.errors import StorageError
from app.storage import cache_folder, is_local, to_path

_MAX_OPEN = 256
"""Open shards of a process. Each has an open file, and is mapped into memory."""
_MIN_READS = 8
"""Reads of each open shard, on average, before all are closed for others. A new window needs others."""
_DOWNLOADS = 4
_READ_AHEAD_BYTES = 2**17
"""By default, the kernel reads no more ahead at a time."""
_LOCK_FILE = ".lock"
_MAX_DOWNLOAD_S = 3600
"""Age from which a temporary file is what a killed process left."""


def shared_shards() -> Path:
    """Return the cache of shards, which all processes of a machine share."""
    return cache_folder("shards")


class ShardCache:
    """Opens the shards of a folder. Each process compares each with its checksum before it reads it first.

    It can be pickled, and used after a fork: each process opens the files itself.
    """

    def __init__(self, location: str, shards: Sequence[Shard], max_bytes: int) -> None:
        """``location`` is the folder of ``shards``, and ``max_bytes`` the size of the cache on this machine's disk."""
        self._location, self._shards, self._max_bytes = location, shards, max_bytes
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {"_location": self._location, "_shards": self._shards, "_max_bytes": self._max_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _forget(self) -> None:
        self._process = os.getpid()
        self._root = to_path(self._location)
        self._open: dict[int, OpenShard] = {}
        self._reads = 0
        """Reads since all shards were closed."""
        self._verified: set[str] = set()
        self._downloads: ThreadPoolExecutor | None = None

    def open(self, number: int) -> OpenShard:
        """Open a shard.

        Raises:
            StorageError: the shard is missing, torn or was changed.
        """
        self._notice_fork()
        self._reads += 1
        if number in self._open:
            return self._open[number]
        shard = self._shards[number]
        path = self._local_file(shard)
        try:
            opened = OpenShard(path)
        except FileNotFoundError:
            # Another process has made room in between, or the shard is gone.
            self._verified.discard(shard.sha256)
            return self.open(number)
        except pa.ArrowInvalid as error:
            raise StorageError(f"shard {str(path)!r} cannot be read ({error}): prepare the data again").of(
                "shard.unreadable"
            ) from error
        self._unmap_evicted()
        self._unmap_read()
        self._open[number] = opened
        return opened

    def _unmap_read(self) -> None:
        """Close all shards after many reads: pages that were read stay in the memory of this process.

        Shards that are still needed are opened again, without another checksum check.
        """
        if self._reads > _MIN_READS * len(self._open) or len(self._open) >= _MAX_OPEN:
            self._open.clear()
            self._reads = 0

    def _unmap_evicted(self) -> None:
        """Close shards whose files have left the cache: while mapped, they still take disk space."""
        if is_local(self._root):
            return
        folder = shared_shards()
        for number in [number for number in self._open if not self._cached(folder, self._shards[number]).exists()]:
            del self._open[number]

    @staticmethod
    def _cached(folder: Path, shard: Shard) -> Path:
        return folder / f"{shard.sha256}.arrow"

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Have these shards downloaded, or read from the disk, in the background. Opening one raises its error."""
        self._notice_fork()
        if is_local(self._root):
            for number in numbers:
                _read_ahead(Path((self._root / self._shards[number].name).path))
            return
        self._unmap_evicted()
        if self._downloads is None:
            self._downloads = ThreadPoolExecutor(_DOWNLOADS, thread_name_prefix="shards")
        for number in numbers:
            if number not in self._open:
                self._downloads.submit(lambda shard: _read_ahead(self._local_file(shard)), self._shards[number])

    def close(self) -> None:
        """Drop downloads that have not begun."""
        if self._downloads and self._process == os.getpid():
            self._downloads.shutdown(wait=True, cancel_futures=True)
        self._forget()

    def _notice_fork(self) -> None:
        if self._process != os.getpid():
            self._forget()

    def _local_file(self, shard: Shard) -> Path:
        """Return a verified file of this machine. Raises StorageError if it is missing, torn or was changed."""
        source = self._root / shard.name
        if is_local(self._root):
            path = Path(source.path)
            try:
                if shard.sha256 not in self._verified:
                    require_intact(str(source), shard, sha256_of_file(path))
            except FileNotFoundError as error:
                raise _missing(str(source)) from error
            self._verified.add(shard.sha256)
            return path
        folder = shared_shards()
        folder.mkdir(parents=True, exist_ok=True)
        cached = self._cached(folder, shard)
        # Processes of a machine want the same shard at about the same time: one downloads it.
        with _locked(folder / f".{shard.sha256[:2]}{_LOCK_FILE}"):
            if not self._is_cached(shard, cached):
                self._download(shard, cached)
            self._verified.add(shard.sha256)
        return cached

    def _is_cached(self, shard: Shard, cached: Path) -> bool:
        """Return whether the cache has an intact copy. One that a broken disk or a crash tore is removed."""
        try:
            os.utime(cached)
            if shard.sha256 in self._verified or sha256_of_file(cached) == shard.sha256:
                return True
        except FileNotFoundError:
            return False
        cached.unlink(missing_ok=True)
        return False

    def _download(self, shard: Shard, cached: Path) -> None:
        source = self._root / shard.name
        temporary = cached.with_name(f".{cached.name}.{secrets.token_hex(4)}.tmp")
        try:
            source.fs.get_file(source.path, str(temporary))
            require_intact(str(source), shard, sha256_of_file(temporary))
            # Not synced: the checksum reveals a file that a crash has torn, and it is downloaded again.
            with _locked(cached.parent / _LOCK_FILE):
                _make_room(cached.parent, self._max_bytes - shard.bytes)
                temporary.rename(cached)
        except FileNotFoundError as error:
            raise _missing(str(source)) from error
        finally:
            temporary.unlink(missing_ok=True)


def _make_room(folder: Path, max_bytes: int) -> None:
    """Remove the files that were used longest ago.

    A process that has mapped one goes on reading it, until it opens its next shard.
    """
    _sweep(folder)
    files = []
    for path in folder.glob("*.arrow"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        files.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= max_bytes:
            return
        path.unlink(missing_ok=True)
        total -= size


def _sweep(folder: Path) -> None:
    """Remove the temporary files of killed processes."""
    for path in folder.glob(".*.tmp"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _MAX_DOWNLOAD_S:
                path.unlink()


def _read_ahead(path: Path) -> None:
    """Have the kernel read a file: a disk would take long to read texts one by one, in a random order."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for start in range(0, path.stat().st_size, _READ_AHEAD_BYTES):
            os.posix_fadvise(file.fileno(), start, _READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)


def _missing(path: str) -> StorageError:
    return StorageError(
        f"shard {path!r} is missing: delete its folder with 'rayloom data delete', and prepare the data again"
    ).of("shard.missing")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
