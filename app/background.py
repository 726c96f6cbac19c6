"""Repeat work in a background thread."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
