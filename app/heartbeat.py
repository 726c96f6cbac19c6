"""The heartbeat of a job on a folder, and its lock: a file that the job rewrites every few seconds while it works."""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from upath import UPath

from app.best_effort import BestEffort, best_effort, repeat_in_background
from app.errors import StorageError
from app.shared_files import change, read
from app.storage import write_atomically

HEARTBEAT_FILE = "heartbeat"
_INTERVAL_S = 2.0
_TIMEOUT_S = 3 * _INTERVAL_S
_MAX_LAST_BEATS = 5  # a worker writes a few more after its job was killed


@contextmanager
def keep_heartbeat(run_folder: UPath) -> Iterator[None]:
    """Write the heartbeat at once and then every few seconds, from a thread, until the block ends."""
    try_write = BestEffort("the heartbeat cannot be written", "the job")

    def beat() -> None:
        try_write(lambda: write_atomically(run_folder / HEARTBEAT_FILE, uuid.uuid4().hex.encode()))

    beat()
    with repeat_in_background(beat, _INTERVAL_S, name="heartbeat"):
        yield


@contextmanager
def run_lock(run_folder: UPath) -> Iterator[None]:
    """Lock the run for this job. After the block another job may resume it at once.

    If several jobs try at once, one succeeds, on a local disk and on S3. Other object stores cannot guarantee it.

    Raises:
        StorageError: another job has locked it since ``require_not_running``, or storage cannot be written.
    """
    path = run_folder / HEARTBEAT_FILE
    try:
        run_folder.mkdir(parents=True, exist_ok=True)
        _replace(path, b"", uuid.uuid4().hex.encode())
    except OSError as error:
        raise StorageError(f"storage {str(run_folder)!r} cannot be written ({error}): check its rights").of(
            "storage.not_written", "storage"
        ) from error
    with _held(run_folder):
        yield


@contextmanager
def wait_for_lock(folder: UPath, what: str) -> Iterator[None]:
    """Lock a folder for this job, once no other job has it: it ended, or its heartbeat stopped.

    Args:
        folder: has the heartbeat.
        what: the job's work, for messages.
    """
    path = folder / HEARTBEAT_FILE
    folder.mkdir(parents=True, exist_ok=True)
    while not _try_lock(path, _last_beat(path, what)):
        print(f"another job began {what} first", flush=True)
    with _held(folder):
        yield


@contextmanager
def _held(folder: UPath) -> Iterator[None]:
    """Keep the heartbeat of a folder, and remove it at the end."""
    path = folder / HEARTBEAT_FILE
    try:
        with keep_heartbeat(folder):
            yield
    finally:  # the result is already written: a storage error must not lose it
        best_effort(lambda: path.unlink(missing_ok=True), f"{str(path)!r} cannot be removed", "the job")


def _last_beat(path: UPath, what: str) -> bytes:
    """Wait until a heartbeat stops, and return what is left of it: nothing, unless its job was killed."""
    if not (last := read(path)):
        return b""
    print(f"another job was {what}: waiting until it ends", flush=True)
    deadline = time.monotonic() + _TIMEOUT_S
    while last and time.monotonic() < deadline:
        time.sleep(0.2)
        if (beat := read(path)) != last:
            last, deadline = beat, time.monotonic() + _TIMEOUT_S
    return last or b""


def _try_lock(path: UPath, expected: bytes) -> bool:
    try:
        _replace(path, expected, uuid.uuid4().hex.encode())
    except StorageError:  # another job was faster
        return False
    return True


def require_not_running(run_folder: UPath) -> None:
    """Check that no job trains the run. A worker whose job was killed may need a few seconds to end: wait for it.

    Two writers would remove each other's checkpoints. The file that a killed job left is emptied. Clocks are not
    compared: the run is being trained if the file's content changes.

    Raises:
        StorageError: the run is being trained.
    """
    path = run_folder / HEARTBEAT_FILE
    last_beat = read(path)
    if not last_beat:
        return
    print(f"run {run_folder.name} was being trained; waiting {_TIMEOUT_S:.0f} s to see whether it still is", flush=True)
    num_beats, deadline = 0, time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if not (beat := read(path)):
            return
        if beat != last_beat:
            # Each beat restarts the wait. The workers of a killed job write only a few more.
            last_beat, num_beats, deadline = beat, num_beats + 1, time.monotonic() + _TIMEOUT_S
        if num_beats > _MAX_LAST_BEATS:
            raise _running_error(run_folder)
    _replace(path, last_beat, b"")


def _replace(path: UPath, expected: bytes, new: bytes) -> None:
    """Replace the beat of an idle run. Raises StorageError if it is neither ``expected`` nor empty.

    It may already be ``new``: if the response to a write is lost, the driver retries the write.
    """

    def replaced(now: bytes) -> bytes:
        if now not in (expected, b"", new):
            raise _running_error(path.parent)
        return new

    change(path, replaced)


def _running_error(run_folder: UPath) -> StorageError:
    return StorageError(
        f"run {run_folder.name} is being trained right now: pause it with 'rayloom pause {run_folder.name}', "
        "or wait for its end"
    ).of("run.under_way")
