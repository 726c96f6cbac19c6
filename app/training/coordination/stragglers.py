"""Workers that hold up the others."""

import math
import time
from collections.abc import Sequence

from app.training.worker import Worker
from app.warnings import warn

_SLOW_FACTOR, _SLOW_S = 2.0, 0.1
_INTERVAL_S = 10.0


class StragglerWarning:
    """Says which workers are slow, at most every few seconds."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._warned = -math.inf

    def look(self, busy_s: Sequence[float]) -> None:
        """Look at the seconds a step that each worker, by rank, was busy itself."""
        slow = slow_ranks(busy_s)
        if not slow or time.monotonic() - self._warned < _INTERVAL_S:
            return
        self._warned = time.monotonic()
        for rank in slow if self._worker.is_first else ():
            warn(
                f"rank {rank} is slow: {busy_s[rank]:.3f} s of its own work a step, "
                f"the fastest takes {min(busy_s):.3f} s"
            )


def slow_ranks(busy_s: Sequence[float]) -> list[int]:
    """Workers that take twice as long as the median, and a tenth of a second more."""
    median = sorted(busy_s)[(len(busy_s) - 1) // 2]
    limit = max(_SLOW_FACTOR * median, median + _SLOW_S)
    return [rank for rank, busy in enumerate(busy_s) if busy > limit]
