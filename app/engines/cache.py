"""What an engine compiled while loading, kept in a folder of this machine so that the next load is faster."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from upath import UPath

from app.storage import write_atomically

_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class CacheFile:
    """One file, which begins with the sha256 of the rest: what is not whole counts as not there."""

    path: Path

    @classmethod
    def of(cls, folder: Path, *key: str) -> "CacheFile":
        """The file for ``key``: everything that what is compiled depends on."""
        return cls(folder / hashlib.sha256("\n".join(key).encode()).hexdigest())

    def read(self) -> bytes | None:
        """The content, or None if there is none or it was changed."""
        try:
            stored = self.path.read_bytes()
        except FileNotFoundError:
            return None
        digest, content = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
        return content if hashlib.sha256(content).digest() == digest else None

    def write(self, content: bytes) -> None:
        """Keep ``content`` in place of what was there; a reader sees the one or the other."""
        write_atomically(UPath(self.path), hashlib.sha256(content).digest() + content)
