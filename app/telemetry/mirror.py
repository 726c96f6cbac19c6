"""Files that grow: appended to on the local disk, and copied to storage in the background."""

import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from upath import UPath

from app.storage import is_local, write_atomically
from app.warnings import Attempts

_INTERVAL_S = 5.0
_MAX_BUSY = 0.1
"""Share of the time that copying may take: object stores take whole files, and these grow."""


class Mirror:
    """A local folder for the growing files of a folder in storage.

    Objects cannot be appended to. On an object store the files lie in a temporary folder, and every few seconds a
    thread copies those that have changed. On a local disk ``folder`` is the folder in storage, and nothing is copied.
    Training never fails for these files: what storage refuses is printed as a warning, and copied next time.
    """

    def __init__(self, target: UPath, interval_s: float = _INTERVAL_S) -> None:
        self._target, self._interval_s = target, interval_s
        self._temporary = None if is_local(target) else tempfile.TemporaryDirectory(prefix="rayloom-mirror-")
        self.folder = Path(self._temporary.name if self._temporary else target.path)
        """Where to write. It need not exist on a local disk."""
        self._copied: dict[str, tuple[int, int]] = {}
        """Time and size of each file as storage has it."""
        self._copying = Attempts(f"{str(target)!r} cannot be written, and is tried again")
        self._busy, self._stopped = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True, name="mirror")
        if self._temporary:
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fetch(self, name: str) -> Path:
        """Return the local file ``name``, with all that storage has of it, to append to.

        Raises:
            OSError: storage cannot be read.
        """
        file = self.folder / name
        if self._temporary and not file.exists():
            source = self._target / name
            if source.exists():
                file.write_bytes(source.read_bytes())
                self._copied[name] = _version(file)
        return file

    def flush(self) -> None:
        """Copy what has changed, and return once storage has it, or has refused it."""
        if self._temporary:
            with self._busy:
                self._copying(self._copy)

    def close(self) -> None:
        """Copy what has changed, and stop; what is appended later is lost."""
        if self._temporary:
            self._stopped.set()
            self._thread.join()
            self.flush()
            self._temporary.cleanup()

    def _go_on(self) -> None:
        pause_s = self._interval_s
        while not self._stopped.wait(pause_s):
            began = time.monotonic()
            self.flush()
            pause_s = max(self._interval_s, (time.monotonic() - began) / _MAX_BUSY)

    def _copy(self) -> None:
        for name in self._names():
            version = _version(self.folder / name)  # before the content, which may grow meanwhile
            if self._copied.get(name) != version:
                write_atomically(self._target / name, (self.folder / name).read_bytes())
                self._copied[name] = version

    def _names(self) -> Iterator[str]:
        """Yield the files, except those that are being written aside."""
        for file in self.folder.rglob("[!.]*"):
            if file.is_file():
                yield file.relative_to(self.folder).as_posix()


def _version(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_mtime_ns, stat.st_size
