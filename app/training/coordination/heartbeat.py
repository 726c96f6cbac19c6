"""A file that tells whether a run is being trained: its first worker writes it anew every few seconds."""

import threading
import time
import uuid

from upath import UPath

from app.errors import StorageError
from app.storage import write_atomically
from app.warnings import attempt

HEARTBEAT_FILE = "heartbeat"
_INTERVAL_S = 2.0
_SILENT_S = 3 * _INTERVAL_S
_LAST_BEATS = 5  # of a worker whose job was killed just now


class Heartbeat:
    """Beats from a thread, whatever training does, until it is closed; then the file is gone."""

    def __init__(self, run_folder: UPath) -> None:
        self._path = run_folder / HEARTBEAT_FILE
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")
        self._thread.start()

    def close(self) -> None:
        """Let the run go: another job may go on with it at once."""
        self._closed.set()
        self._thread.join()
        self._path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while True:
            attempt(lambda: write_atomically(self._path, uuid.uuid4().hex.encode()), "the heartbeat cannot be written")
            if self._closed.wait(_INTERVAL_S):
                return


def require_silence(run_folder: UPath) -> None:
    """Wait until nobody trains the run; a worker whose job was killed may need a few seconds to end.

    Two writers would remove each other's checkpoints. No clock is compared: what counts is whether the file changes.

    Raises:
        StorageError: the run is being trained.
    """
    path = run_folder / HEARTBEAT_FILE
    seen = _read(path)
    if seen is None:
        return
    print(f"run {run_folder.name} was being trained; waiting {_SILENT_S:.0f} s to see whether it still is", flush=True)
    changes, deadline = 0, time.monotonic() + _SILENT_S
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if (now := _read(path)) is None:
            return
        if now != seen:
            seen, changes, deadline = now, changes + 1, time.monotonic() + _SILENT_S
        if changes > _LAST_BEATS:
            raise StorageError(
                f"run {run_folder.name} is being trained right now: pause it with 'rayloom pause {run_folder.name}', "
                "or wait for its end"
            )


def _read(path: UPath) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
