"""Handling of SIGTERM, which ``ray job stop`` sends to a job."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_sigterm(request_stop: Callable[[], None], consequence: str) -> Iterator[None]:
    """On SIGTERM inside the block, print ``consequence`` and call ``request_stop`` instead of ending the job."""

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        print(f"asked to stop: {consequence}", flush=True)
        request_stop()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
