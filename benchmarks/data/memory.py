"""The memory of a process, or of a process with its children, sampled while it works."""

import contextlib
import threading
from collections.abc import Callable
from typing import Self

import psutil

_SAMPLE_S = 0.05


def private_bytes() -> int:
    """Private memory (USS) of this process, including pages of files that only it has mapped."""
    return int(psutil.Process().memory_full_info().uss)


def family_bytes() -> tuple[int, int]:
    """Memory (PSS) of this process and its descendants: all, and without Ray's own services."""
    process, total, services = psutil.Process(), 0, 0
    for member in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it ended while we looked
            size = int(member.memory_full_info().pss)
            total += size
            # A worker process is named after its task. Idle ones count as workers, too.
            is_service = member != process and not member.name().startswith("ray::")
            services += size * is_service
    return total, total - services


class PeakMemory:
    """The largest of the numbers that a function returns while the block runs."""

    def __init__(self, measure: Callable[[], int] = private_bytes, every_s: float = _SAMPLE_S) -> None:
        self._measure, self._every_s, self._done = measure, every_s, threading.Event()
        self.before = self.peak = measure()

    @property
    def growth(self) -> int:
        """Bytes above those before the block."""
        return self.peak - self.before

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(self._every_s):
            self.peak = max(self.peak, self._measure())
