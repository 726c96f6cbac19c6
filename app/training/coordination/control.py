"""How a person or a program asks a run to stop: one small file in its folder."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from upath import UPath

from app.background import repeat_in_background
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

    def __init__(self, run_folder: UPath) -> None:
        self._run_folder = run_folder
        self._reading = Attempts(f"what is asked of the run cannot be read from {str(run_folder / CONTROL_FILE)!r}")
        self._asked = self._asked_by_file = Action.CONTINUE  # two fields: signal handlers and the thread must not race

    def ask(self, what: Action) -> None:
        """Ask from within this process."""
        self._asked = max(self._asked, what)

    def asked(self) -> Action:
        """Return the strongest request so far. Never waits for storage."""
        return max(self._asked, self._asked_by_file)

    @contextmanager
    def poll(self) -> Iterator[None]:
        """Read the file now, and then every second in a background thread until the block ends.

        Only one process of a run polls. It shares the result with the others.
        """
        self._poll_once()
        with repeat_in_background(self._poll_once, _POLL_S, name="control"):
            yield

    def _poll_once(self) -> None:
        def read_file() -> None:
            self._asked_by_file = max(self._asked_by_file, requested(self._run_folder))

        self._reading(read_file)

    def listen(self) -> None:
        """Take SIGTERM as a request to stop. Python lets only a process's main thread do so."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.ask(Action.STOP)
