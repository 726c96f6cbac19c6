"""Requests to stop or pause a run, or to yield: by a file in its folder, by SIGTERM, or by the cluster."""

import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType

from upath import UPath

from app.best_effort import BestEffort, repeat_in_background
from app.shared_files import read
from app.storage import write_atomically

CONTROL_FILE = "control"
_POLL_S = 1.0


class StopRequest(IntEnum):
    """A request to a run. ``max`` of two requests is the stronger one."""

    NONE = 0
    YIELD = 1
    """Save the state and end, so that as many workers go on as there is room for."""
    PAUSE = 2
    STOP = 3


def request_stop(run_folder: UPath, request: StopRequest) -> None:
    """Ask the run to pause or stop."""
    # Two requests of one kind differ, so that a job knows which of them has been obeyed.
    write_atomically(run_folder / CONTROL_FILE, f"{request.name.lower()} {secrets.token_hex(4)}".encode())


def read_stop_request(run_folder: UPath) -> StopRequest:
    """Return the request in the run's folder; NONE if there is none, or it was withdrawn."""
    content = written_request(run_folder)
    return StopRequest.NONE if content is None else StopRequest[content.decode().split()[0].upper()]


def written_request(run_folder: UPath) -> bytes | None:
    """Return the request as it is written; None if there is none. No two requests are written alike."""
    return read(run_folder / CONTROL_FILE)


def withdraw_stop_request(run_folder: UPath) -> None:
    """Remove the request. A run that resumes has already obeyed it."""
    (run_folder / CONTROL_FILE).unlink(missing_ok=True)


class StopSignals:
    """Stop requests to this process's run, from the file and from SIGTERM."""

    def __init__(self, run_folder: UPath) -> None:
        self._run_folder = run_folder
        file = str(run_folder / CONTROL_FILE)
        self._best_effort = BestEffort(f"the run's stop request cannot be read from {file!r}")
        # Two fields: the signal handler and the polling thread must not overwrite each other's request.
        self._from_process = self._from_file = StopRequest.NONE

    def request(self, request: StopRequest) -> None:
        """Ask from within this process."""
        self._from_process = max(self._from_process, request)

    def strongest(self) -> StopRequest:
        """Return the strongest request so far. Never waits for storage."""
        return max(self._from_process, self._from_file)

    @contextmanager
    def poll_file(self) -> Iterator[None]:
        """Read the file now, and then every second in a background thread until the block ends.

        Only one process of a run polls. It shares the result with the others.
        """
        self._poll_once()
        with repeat_in_background(self._poll_once, _POLL_S, name="stop request"):
            yield

    def _poll_once(self) -> None:
        def read_file() -> None:
            self._from_file = max(self._from_file, read_stop_request(self._run_folder))

        self._best_effort(read_file)

    def listen(self) -> None:
        """Take SIGTERM as a request to stop. Python lets only a process's main thread do so."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.request(StopRequest.STOP)
