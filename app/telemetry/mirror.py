"""Growing files: written to the local disk and copied to storage in the background."""

import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from upath import UPath

from app.best_effort import BestEffort, repeat_in_background
from app.storage import is_local, write_atomically

_INTERVAL_S = 5.0
_MAX_SHARE = 0.1
"""Maximum share of time spent copying. Object stores take whole files, so each copy of a growing file costs more."""


class Mirror:
    """A local folder for the growing files of a folder in storage.

    Objects cannot be appended to. For an object store the files are written to a temporary folder, and a thread copies
    the changed ones every few seconds. On a local disk ``folder`` is the folder in storage, and nothing is copied.
    Errors never stop training: if storage refuses a file, a warning is printed and the next copy retries.
    """

    def __init__(self, target: UPath, interval_s: float = _INTERVAL_S) -> None:
        self._target, self._interval_s = target, interval_s
        self._temporary = None if is_local(target) else tempfile.TemporaryDirectory(prefix="rayloom-mirror-")
        self.folder = Path(self._temporary.name if self._temporary else target.path)
        """The folder to write to. On a local disk it may not exist yet."""
        self._copied: dict[str, tuple[int, int]] = {}
        """Modification time and size of each file at its last copy."""
        self._try_copy = BestEffort(f"{str(target)!r} cannot be written and will be retried")
        self._copy_lock, self._resources = threading.Lock(), ExitStack()

    def __enter__(self) -> Self:
        if self._temporary:
            # These run in reverse: the thread ends, the last copy is made, and the folder is removed.
            self._resources.callback(self._temporary.cleanup)
            self._resources.callback(self.flush)
            self._resources.enter_context(
                repeat_in_background(self.flush, self._interval_s, name="mirror", max_share=_MAX_SHARE)
            )
        return self

    def __exit__(self, *_: object) -> None:
        """Copy the changed files and stop. Later writes are not copied."""
        self._resources.close()

    def fetch(self, name: str) -> Path:
        """Return the local file ``name`` to append to, with the content that it has in storage.

        Raises:
            OSError: storage cannot be read.
        """
        file = self.folder / name
        if self._temporary and not file.exists():
            source = self._target / name
            if source.exists():
                content = source.read_bytes()
                with self._copy_lock:  # or the thread could copy an incomplete file back
                    file.write_bytes(content)
                    self._copied[name] = _version(file)
        return file

    def flush(self) -> None:
        """Copy the changed files. Returns once storage has accepted or refused them."""
        if self._temporary:
            with self._copy_lock:
                self._try_copy(self._copy)

    def _copy(self) -> None:
        for name in self._names():
            # This comes before the content is read, since the file may grow.
            version = _version(self.folder / name)
            if self._copied.get(name) != version:
                write_atomically(self._target / name, (self.folder / name).read_bytes())
                self._copied[name] = version

    def _names(self) -> Iterator[str]:
        """Yield the files, except the temporary files of atomic writes."""
        for file in self.folder.rglob("[!.]*"):
            if file.is_file():
                yield file.relative_to(self.folder).as_posix()


def _version(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_mtime_ns, stat.st_size
