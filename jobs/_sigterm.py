"""``ray job stop`` sends SIGTERM to a job."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_sigterm(ask: Callable[[], None], answer: str) -> Iterator[None]:
    """What runs inside is asked to end, and ``answer`` printed; before and after, the signal ends the job."""

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        print(f"asked to stop: {answer}", flush=True)
        ask()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
