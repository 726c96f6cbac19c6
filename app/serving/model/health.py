"""Whether an engine answers."""

import asyncio
import time
from collections.abc import Callable, Iterable

from app.errors import EngineError

_TRUSTED_S = 5.0
"""For how long an engine that has answered need not be asked again."""
_STUCK_S = 60.0
"""An engine that is at work on one call for so long will not come back."""
_WAIT_S = 0.2
"""For an answer to a check; what comes later, the next check hears."""
_MAX_BLANKS_S = 0.1
"""Limit on the total time of the blank requests of one round of checks; one request is always allowed."""


class EngineHealth:
    """What is known of an engine by what it answered, and by blank requests to it, one at a time."""

    def __init__(self, run_probe: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        """Of one that has answered just now.

        Args:
            run_probe: has the engine answer a blank request, in whichever thread; raises EngineError.
            clock: returns seconds.
        """
        self._run_blank = run_probe
        self._clock = clock
        self.answered_s = clock()
        """The time of its last answer, by ``clock``."""
        self.probe_s = 0.0
        """The duration of the last blank request; 0 before the first one."""
        self._blank: asyncio.Task[None] | None = None
        self._blank_s = 0.0

    def answered(self) -> None:
        """It has answered a request."""
        self.answered_s = self._clock()

    async def ask(self) -> None:
        """Have it answer a blank request: that which it is at, else a new one.

        Raises:
            EngineError: it fails, or answers numbers that are not finite.
        """
        await asyncio.shield(self._asked())  # others may wait for the same answer

    @property
    def is_stale(self) -> bool:
        """Whether its last answer is so old that it should be asked again."""
        return self._clock() - self.answered_s > _TRUSTED_S

    async def check(self, running_s: float, *, may_probe: bool = True) -> None:
        """See whether it answers. One that is at work is left to it, however long others wait behind that.

        Args:
            running_s: how long it has been at work on requests; 0 if it is not.
            may_probe: whether the check may send it a blank request.

        Raises:
            EngineError: it fails, answers numbers that are not finite, or does not come back from a call.
        """
        if may_probe and self._blank is None and not running_s and self.is_stale:
            self._asked()
        if self._blank:  # not waited for: an engine may need longer than Serve gives a check
            await asyncio.wait([self._blank], timeout=_WAIT_S)
            if self._blank.done():
                ended, self._blank = self._blank, None
                ended.result()
            else:
                running_s = max(running_s, self._clock() - self._blank_s)
        if running_s > _STUCK_S:
            raise EngineError(f"the engine has been at work on one call for {running_s:.0f} s: the replica is replaced")

    async def close(self) -> None:
        """Wait until no blank request runs."""
        if self._blank:
            await asyncio.wait([self._blank])

    def _asked(self) -> asyncio.Task[None]:
        if self._blank is None or self._blank.done():
            self._blank, self._blank_s = asyncio.create_task(self._run()), self._clock()
        return self._blank

    async def _run(self) -> None:
        self.probe_s = await asyncio.to_thread(self._timed_blank)
        self.answered()

    def _timed_blank(self) -> float:
        began_s = self._clock()
        self._run_blank()
        return self._clock() - began_s


def choose_probes(engines: Iterable[EngineHealth]) -> set[EngineHealth]:
    """Return the engines to which one round of checks may send blank requests: those with the oldest answers first.

    The total time of these requests is limited. Otherwise, checks of many idle engines would keep the cores busy.
    """
    chosen: set[EngineHealth] = set()
    for engine in sorted(filter(lambda engine: engine.is_stale, engines), key=lambda engine: engine.answered_s):
        if sum(other.probe_s for other in chosen) >= _MAX_BLANKS_S:
            break
        chosen.add(engine)
    return chosen
