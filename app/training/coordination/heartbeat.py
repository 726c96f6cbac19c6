"""A file that tells whether a run is being trained: its job writes it anew every few seconds."""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from upath import UPath

from app.background import repeat_in_background
from app.conditional import change, read
from app.errors import StorageError
from app.storage import write_atomically
from app.warnings import Attempts, attempt

HEARTBEAT_FILE = "heartbeat"
_INTERVAL_S = 2.0
_SILENT_S = 3 * _INTERVAL_S
_LAST_BEATS = 5  # of a worker whose job was killed just now


@contextmanager
def keep_heartbeat(run_folder: UPath) -> Iterator[None]:
    """Write the heartbeat at once and then every few seconds, from a thread, until the block ends."""
    attempts = Attempts("the heartbeat cannot be written", "the job")

    def beat() -> None:
        attempts(lambda: write_atomically(run_folder / HEARTBEAT_FILE, uuid.uuid4().hex.encode()))

    beat()
    with repeat_in_background(beat, _INTERVAL_S, name="heartbeat"):
        yield


@contextmanager
def held(run_folder: UPath) -> Iterator[None]:
    """Keep the run to this job; when it lets go, another may go on with it at once.

    If several jobs try at once, one succeeds, on a local disk and on S3. Other object stores cannot guarantee it.

    Raises:
        StorageError: another job has taken it since ``require_silence``, or storage cannot be written.
    """
    path = run_folder / HEARTBEAT_FILE
    try:
        run_folder.mkdir(parents=True, exist_ok=True)
        _replace(path, b"", uuid.uuid4().hex.encode())
    except OSError as error:
        raise StorageError(f"storage {str(run_folder)!r} cannot be written ({error}): check its rights") from error
    try:
        with keep_heartbeat(run_folder):
            yield
    finally:  # the result is already written: a storage error must not lose it
        attempt(lambda: path.unlink(missing_ok=True), f"{str(path)!r} cannot be removed", "the job")


def require_silence(run_folder: UPath) -> None:
    """Wait until nobody trains the run; a worker whose job was killed may need a few seconds to end.

    The file that a killed job left is emptied. Two writers would remove each other's checkpoints. No clock is
    compared: what counts is whether the file changes.

    Raises:
        StorageError: the run is being trained.
    """
    path = run_folder / HEARTBEAT_FILE
    seen = read(path)
    if not seen:
        return
    print(f"run {run_folder.name} was being trained; waiting {_SILENT_S:.0f} s to see whether it still is", flush=True)
    changes, deadline = 0, time.monotonic() + _SILENT_S
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if not (now := read(path)):
            return
        if now != seen:
            seen, changes, deadline = now, changes + 1, time.monotonic() + _SILENT_S
        if changes > _LAST_BEATS:
            raise _taken(run_folder)
    _replace(path, seen, b"")


def _replace(path: UPath, expected: bytes, new: bytes) -> None:
    """Replace the beat of an idle run. Raises StorageError if it is neither ``expected`` nor empty.

    It may already be ``new``: if the response to a write is lost, the driver retries the write.
    """

    def replaced(now: bytes) -> bytes:
        if now not in (expected, b"", new):
            raise _taken(path.parent)
        return new

    change(path, replaced)


def _taken(run_folder: UPath) -> StorageError:
    return StorageError(
        f"run {run_folder.name} is being trained right now: pause it with 'rayloom pause {run_folder.name}', "
        "or wait for its end"
    )
