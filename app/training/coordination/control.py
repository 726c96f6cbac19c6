"""How a person or a program asks a run to stop: one small file in its folder."""

import signal
import threading
import time
from types import FrameType

from upath import UPath

from app.conditional import read
from app.storage import write_atomically
from app.telemetry.alerts import Action
from app.warnings import Attempts

CONTROL_FILE = "control"
_POLL_S = 1.0


def request(run_folder: UPath, what: Action) -> None:
    """Ask the run to pause or stop."""
    write_atomically(run_folder / CONTROL_FILE, what.name.lower().encode())


def requested(run_folder: UPath) -> Action:
    """What is asked of the run, and was not withdrawn."""
    content = read(run_folder / CONTROL_FILE)
    return Action.CONTINUE if content is None else Action[content.decode().strip().upper()]


def withdraw(run_folder: UPath) -> None:
    """Forget what was asked; a run that goes on has answered it."""
    (run_folder / CONTROL_FILE).unlink(missing_ok=True)


class Control:
    """What is asked of this process's run, from the file and from SIGTERM."""

    def __init__(self, run_folder: UPath, polls: bool = True) -> None:
        """``polls``: whether this process reads the file. One process of a run does, and shares the result."""
        self._run_folder, self._polls = run_folder, polls
        self._reading = Attempts(f"what is asked of the run cannot be read from {str(run_folder / CONTROL_FILE)!r}")
        self._polled = 0.0
        self._asked = Action.CONTINUE

    def ask(self, what: Action) -> None:
        """Ask from within this process."""
        self._asked = max(self._asked, what)

    def asked(self) -> Action:
        """What is asked now; the file is read once a second at most."""
        if self._polls and time.monotonic() - self._polled >= _POLL_S:
            self._polled = time.monotonic()
            self._reading(lambda: self.ask(requested(self._run_folder)))
        return self._asked

    def listen(self) -> None:
        """Take SIGTERM as a request to stop. Python lets only a process's main thread do so."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.ask(Action.STOP)
