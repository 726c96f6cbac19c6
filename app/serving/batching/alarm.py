"""A timer on the event loop."""

import asyncio
import math
from collections.abc import Callable


class Alarm:
    """Calls a function once, at the earliest of the times that were set."""

    def __init__(self, ring: Callable[[float], None]) -> None:
        """``ring`` is called with the time that was set."""
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = math.inf

    def set(self, due_s: float, now_s: float) -> None:
        """Ring at ``due_s``, unless the alarm rings before."""
        if due_s >= self._due_s:
            return
        self.cancel()
        self._due_s = due_s
        self._timer = asyncio.get_running_loop().call_later(due_s - now_s, self._on_timer)

    def cancel(self) -> None:
        """Forget the time that was set."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due_s = None, math.inf

    def _on_timer(self) -> None:
        due_s, self._timer, self._due_s = self._due_s, None, math.inf
        self._ring(due_s)
