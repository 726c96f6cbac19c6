"""One attempt at a trial: the same training as everywhere, stopped after each epoch until somebody says go on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from queue import SimpleQueue

from upath import UPath

from app.telemetry.mirror import Mirror
from app.training.records import Ending, EpochRecord
from app.training.reporting.recorder import Report

LOG_FILE = "log.txt"
CUT_TIMEOUT_S = 30.0

Train = Callable[[Report], Ending]


class _Cut(BaseException):
    """Unwinds training from within its report; no ``except Exception`` on the way holds it up."""


class Attempt:
    """Trains in a thread, an epoch at a time."""

    def __init__(self, train: Train) -> None:
        self._thread = threading.Thread(target=self._run, args=(train,), daemon=True, name="trial")
        self._said: SimpleQueue[EpochRecord | Ending | BaseException] = SimpleQueue()
        self._go_on: SimpleQueue[bool] = SimpleQueue()

    def next(self) -> EpochRecord | Ending:
        """Train the next epoch, or end. Raises what training raises."""
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go_on.put(True)
        said = self._said.get()
        if isinstance(said, BaseException):
            raise said
        return said

    def cut(self) -> bool:
        """Stop the training and wait until its last checkpoint is stored.

        Return whether its thread has ended: False if that takes longer than half a minute.
        """
        if self._thread.is_alive():
            self._go_on.put(False)
            self._thread.join(CUT_TIMEOUT_S)
        return not self._thread.is_alive()

    def _run(self, train: Train) -> None:
        try:
            self._said.put(train(self._report))
        except _Cut:
            return
        except BaseException as error:  # whoever waits for the epoch gets it
            self._said.put(error)

    def _report(self, record: EpochRecord) -> None:
        self._said.put(record)
        if not self._go_on.get():
            raise _Cut


@contextmanager
def log_to(folder: UPath) -> Iterator[None]:
    """What is printed goes into a file of the trial's folder instead of on the screen."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        Mirror(folder) as mirror,
        mirror.fetch(LOG_FILE).open("a", encoding="utf-8", buffering=1) as log,
        redirect_stdout(log),
        redirect_stderr(log),
    ):
        yield
