"""Copies of a study's SQLite file, made in the background while a search writes to it.

On a disk the copy is a backup beside the file. SQLite cannot write to an object store. There the search writes a local
file and uploads copies of it; a resumed search starts from the last copy.
"""

import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.best_effort import BestEffort, repeat_in_background
from app.errors import StorageError
from app.storage import no_op
from app.tuning.storage import StudyLocation, explained

_INTERVAL_S = 2.0
_MAX_SHARE = 0.1
"""Maximum share of the time that is spent on copying: with thousands of trials, one copy takes seconds."""

_LOCK_TIMEOUT_S = 5.0
"""Maximum wait for a locked file. It is short, because the next attempt follows in a few seconds."""


@dataclass
class Scratch:
    """A local folder for the SQLite files of studies on an object store."""

    path: Path
    keep: bool = False
    """True while a file in it may have results that storage does not have."""


@contextmanager
def scratch_folder() -> Iterator[Scratch]:
    """Make a temporary folder. On exit, remove it unless ``keep`` is set."""
    scratch = Scratch(Path(tempfile.mkdtemp(prefix="rayloom-study-")))
    try:
        yield scratch
    finally:
        if not scratch.keep:
            shutil.rmtree(scratch.path, ignore_errors=True)


class Snapshots:
    """Copies of a SQLite file that other connections change."""

    def __init__(self, file: Path, publish: Callable[[Path], None]) -> None:
        """``publish`` moves a finished copy to its destination."""
        self._publish, self._copy = publish, file.with_name(f".{file.name}.tmp")
        # Several threads use this connection, one at a time under the lock.
        self._source = sqlite3.connect(file, timeout=_LOCK_TIMEOUT_S, check_same_thread=False)
        self._copied_version: int | None = None
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Copy the file if it has changed since the last copy, and return whether it had changed. Thread-safe.

        Raises:
            sqlite3.Error: the file cannot be read.
            OSError, StorageError: the copy cannot be written.
        """
        with self._lock:  # a slow upload must not replace a newer copy
            # The version is read before the copy, so that a change during the copy is copied again.
            (version,) = self._source.execute("PRAGMA data_version").fetchone()
            if version == self._copied_version:
                return False
            self._copy.unlink(missing_ok=True)
            with closing(sqlite3.connect(self._copy)) as copy:
                # SQLite copies a consistent state while others write. A copy of the file could be torn.
                self._source.backup(copy)
            self._publish(self._copy)
            self._copied_version = version
            return True

    def close(self) -> None:
        """Close the connection and remove an unfinished copy."""
        self._source.close()
        self._copy.unlink(missing_ok=True)


@contextmanager
def keep_snapshots(location: StudyLocation, scratch: Scratch | None = None) -> Iterator[Callable[[], object]]:
    """Copy a study's file on entry, every few seconds while it changes, and on exit. Skip database servers.

    The block gets a function that makes the study survive the loss of this machine: on an object store, it copies now.

    Args:
        location: the study's database.
        scratch: the folder with the local file of a study on an object store. It is kept unless the last copy succeeds.

    Raises:
        StorageError: the first copy, or the last copy on an object store, cannot be made.
    """
    if location.file is None:
        yield no_op
        return
    scratch = scratch or Scratch(location.file.parent)
    copy = str(location.remote or location.backup)
    try_copy = BestEffort(f"the study cannot be copied to {copy!r}; it is only in {str(location.file)!r}", "the search")
    with closing(Snapshots(location.file, location.publish)) as snapshots:
        with explained(location):
            snapshots.take()
        # From here on, the local file may have results that storage does not have.
        scratch.keep = location.remote is not None
        try:
            with repeat_in_background(
                lambda: try_copy(snapshots.take), _INTERVAL_S, name="snapshots", max_share=_MAX_SHARE
            ):
                yield no_op if location.remote is None else lambda: try_copy(snapshots.take)
        except BaseException:
            # Best effort, because the block's own error is the one to raise.
            scratch.keep &= not try_copy(snapshots.take)
            raise
        # On a disk the study itself is durable, so a failed backup is only a warning.
        if location.remote is None:
            try_copy(snapshots.take)
            return
        try:
            with explained(location):
                snapshots.take()
        except StorageError as error:
            raise StorageError(
                f"{error}; the whole study is in {str(location.file)!r}: upload it to {copy!r}, then go on with "
                "tune.resume=true"
            ).of("study.not_written") from error
        scratch.keep = False
