"""How long requests have taken of late."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from app.errors import DeadlineError

_WINDOW_S = 10.0
_MOST = 1000
"""Requests that are remembered: enough for the 95th of 100 to be steady."""


class RecentLatencies:
    """Of the last thousand requests, those of the last ten seconds that were answered, or would have been too late."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answered: deque[tuple[float, float]] = deque(maxlen=_MOST)

    def add(self, seconds: float) -> None:
        """A request was answered just now, after so long."""
        self._answered.append((self._clock(), seconds))

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add a request that is answered in here, or refused because that would be too late."""
        began_s = self._clock()
        try:
            yield
        except DeadlineError:
            self.add(self._clock() - began_s)
            raise
        self.add(self._clock() - began_s)

    def percentile_s(self, share: float) -> float | None:
        """What this share of the requests took at most; None if there were none."""
        since_s = self._clock() - _WINDOW_S
        recent = sorted(seconds for answered_s, seconds in self._answered if answered_s >= since_s)
        return recent[int(share * (len(recent) - 1))] if recent else None
