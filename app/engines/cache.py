"""A cache on this machine for results of compilation on loading, so that the next load is faster."""

import functools
import hashlib
import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from app.storage import cache_folder, to_path, write_atomically

LOG = logging.getLogger(__name__)
_DIGEST_BYTES = hashlib.sha256().digest_size
_UNREAD_S = 30 * 24 * 3600


def machine_cache() -> Path:
    """Return this machine's cache. The folder must contain nothing else, because old files in it are deleted."""
    return cache_folder("engines")


@dataclass(frozen=True)
class CacheFile:
    """A file that begins with the sha256 of the rest, so an incomplete one counts as missing.

    A folder that cannot be read or written is no error either: the caller goes on without the cache.
    """

    path: Path

    @classmethod
    def of(cls, folder: Path, *key: str) -> "CacheFile":
        """Return the file for ``key``, which must contain everything that the compiled result depends on."""
        return cls(folder / hashlib.sha256("\n".join(key).encode()).hexdigest())

    def read(self) -> bytes | None:
        """Return the content; None if the file is missing, damaged or unreadable."""
        try:
            with self.path.open("rb") as file:
                digest, content = file.read(_DIGEST_BYTES), file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn(self.path.parent, error.strerror)
            return None
        with suppress(OSError):
            # Many file systems do not record when a file was read.
            os.utime(self.path, ns=(time.time_ns(), self.path.stat().st_mtime_ns))
        return content if hashlib.sha256(content).digest() == digest else None

    def write(self, content: bytes) -> None:
        """Replace the content atomically, if the folder is writable. Delete files that were not read for a month."""
        try:
            write_atomically(to_path(self.path), hashlib.sha256(content).digest() + content)
            for file in self.path.parent.iterdir():
                if file.stat().st_atime < time.time() - _UNREAD_S:
                    file.unlink(missing_ok=True)
        except OSError as error:
            _warn(self.path.parent, error.strerror)


@functools.cache
def _warn(folder: Path, problem: str | None) -> None:
    """Warn once about each problem. The function's cache remembers them."""
    LOG.warning(
        "%r cannot be read or written (%s): engines load slower; give $RAYLOOM_CACHE another folder",
        str(folder),
        problem,
    )
