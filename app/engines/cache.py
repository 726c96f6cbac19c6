"""What an engine compiled while loading, kept in a folder of this machine so that the next load is faster."""

import functools
import hashlib
import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from app.storage import to_path, write_atomically

LOG = logging.getLogger(__name__)
_DIGEST_BYTES = hashlib.sha256().digest_size
_UNREAD_S = 30 * 24 * 3600


def machine_cache() -> Path:
    """This machine's folder: ``engines`` in ``$RAYLOOM_CACHE``, else in ``~/.cache/rayloom``.

    It is a folder of its own, since what is old in it goes.
    """
    return Path(os.environ.get("RAYLOOM_CACHE") or "~/.cache/rayloom").expanduser() / "engines"


@dataclass(frozen=True)
class CacheFile:
    """One file, which begins with the sha256 of the rest: what is not whole counts as not there.

    Nor does a folder that cannot be read or written keep anybody from going on without.
    """

    path: Path

    @classmethod
    def of(cls, folder: Path, *key: str) -> "CacheFile":
        """The file for ``key``: everything that what is compiled depends on."""
        return cls(folder / hashlib.sha256("\n".join(key).encode()).hexdigest())

    def read(self) -> bytes | None:
        """The content, or None if there is none, it was changed, or it cannot be read."""
        try:
            with self.path.open("rb") as file:
                digest, content = file.read(_DIGEST_BYTES), file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            _tell(self.path.parent, error.strerror)
            return None
        with suppress(OSError):
            os.utime(self.path, ns=(time.time_ns(), self.path.stat().st_mtime_ns))
        return content if hashlib.sha256(content).digest() == digest else None

    def write(self, content: bytes) -> None:
        """Keep ``content`` in place of what was there, if that can be; a reader sees the one or the other.

        What nobody has read for a month goes.
        """
        try:
            write_atomically(to_path(self.path), hashlib.sha256(content).digest() + content)
            for each in self.path.parent.iterdir():
                if each.stat().st_atime < time.time() - _UNREAD_S:
                    each.unlink(missing_ok=True)
        except OSError as error:
            _tell(self.path.parent, error.strerror)


@functools.cache
def _tell(folder: Path, problem: str | None) -> None:
    """Once for each problem."""
    LOG.warning(
        "%r cannot be read or written (%s): engines load slower; give $RAYLOOM_CACHE another folder",
        str(folder),
        problem,
    )
