"""Side work of a job: optional actions, whose failures are only warnings, and periodic work in the background."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Result = TypeVar("Result")


def warn(message: str) -> None:
    """Print a warning to stderr, where a person reads it."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


class BestEffort:
    """Runs an optional action repeatedly, and warns each time that it starts to fail."""

    def __init__(self, failure: str, work: str = "training", *, hides_error: bool = False) -> None:
        """Name what cannot be done, and the work that goes on without it.

        ``hides_error``: print only the type of an error, whose message may contain a secret.
        """
        self._failure, self._work, self._hides_error = failure, work, hides_error
        self._is_failing = False

    def __call__(self, action: Callable[[], object]) -> bool:
        """Run ``action``, and return whether it succeeded."""
        try:
            action()
        except Exception as error:  # of torch, of the GPU's profiling library, of storage's driver
            if not self._is_failing:
                reason = type(error).__name__ + ("" if self._hides_error else f": {error}")
                warn(f"{self._failure} ({reason}); {self._work} goes on")
            self._is_failing = True
        else:
            self._is_failing = False
        return not self._is_failing


def best_effort(action: Callable[[], object], failure: str, work: str = "training") -> bool:
    """Run ``action``, which ``work`` does not depend on. Return whether it succeeded; if not, warn of ``failure``."""
    return BestEffort(failure, work)(action)


def attempt(action: Callable[[], Result], failure: str, work: str = "training") -> Result | None:
    """Return what ``action`` returns, or None with a warning of ``failure``, as ``best_effort``."""
    results: list[Result] = []
    best_effort(lambda: results.append(action()), failure, work)
    return results[0] if results else None


@contextmanager
def repeat_in_background(
    action: Callable[[], object], interval_s: float, *, name: str, max_share: float = 1.0
) -> Iterator[None]:
    """Repeat ``action`` in a thread until the block ends. The first repetition comes after one interval.

    Args:
        action: must not raise; an exception ends the repetition.
        interval_s: minimum pause between two repetitions.
        name: the thread's name.
        max_share: maximum share of the time that ``action`` takes. If it is slow, the pauses become longer.
    """
    stopped = threading.Event()

    def repeat() -> None:
        pause_s = interval_s
        while not stopped.wait(pause_s):
            began_s = time.monotonic()
            action()
            pause_s = max(interval_s, (time.monotonic() - began_s) * (1 / max_share - 1))

    thread = threading.Thread(target=repeat, daemon=True, name=name)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
