"""Health of an engine: whether it still answers."""

import asyncio
import time
from collections.abc import Callable, Iterable

from app.errors import EngineError

_TRUSTED_S = 5.0
"""An engine that has answered is trusted for this time."""
_STUCK_S = 60.0
"""An engine that runs a single call for this time is stuck."""
_WAIT_S = 0.2
"""Time that a check waits for a probe. A later answer counts for the next check."""
_MAX_PROBES_S = 0.1
"""Limit on the total time of the probes in one round of checks. One probe is always allowed."""


class EngineHealth:
    """The health of an engine, from its answers and from probes. A probe is a blank request; one runs at a time."""

    def __init__(self, run_probe: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        """Start with an engine that has answered just now.

        Args:
            run_probe: runs a blank request on the engine, in any thread; raises EngineError.
            clock: returns seconds.
        """
        self._run_blank = run_probe
        self._clock = clock
        self.answered_s = clock()
        """The time of its last answer, by ``clock``."""
        self.probe_s = 0.0
        """The duration of the last probe; 0 before the first one."""
        self._probe: asyncio.Task[None] | None = None
        self._probe_began_s = 0.0

    def answered(self) -> None:
        """Record an answer."""
        self.answered_s = self._clock()

    async def probe(self) -> None:
        """Wait for the running probe, or for a new one.

        Raises:
            EngineError: the engine fails, or answers numbers that are not finite.
        """
        # Cancelling one caller must not cancel the others' probe.
        await asyncio.shield(self._start_probe())

    @property
    def is_stale(self) -> bool:
        """Whether its last answer is so old that a probe is due."""
        return self._clock() - self.answered_s > _TRUSTED_S

    async def check(self, running_s: float, *, may_probe: bool = True) -> None:
        """Check that the engine answers. A busy engine is not probed, however long its queue is.

        Args:
            running_s: the time for which the oldest call has run; 0 if the engine is idle.
            may_probe: whether the check may start a probe.

        Raises:
            EngineError: the engine fails, answers numbers that are not finite, or is stuck in a call.
        """
        # A busy engine needs no probe: either its call ends, or it counts as stuck below.
        if may_probe and self._probe is None and not running_s and self.is_stale:
            self._start_probe()
        if self._probe:
            # Wait only briefly, because an engine may take longer than Serve gives a check.
            # ``wait_for`` would cancel the probe.
            await asyncio.wait([self._probe], timeout=_WAIT_S)
            if self._probe.done():
                ended, self._probe = self._probe, None
                # Raises the probe's error. The next check starts a new probe.
                ended.result()
            else:
                # A probe that does not return counts as a running call.
                running_s = max(running_s, self._clock() - self._probe_began_s)
        if running_s > _STUCK_S:
            raise EngineError(f"the engine has run a single call for {running_s:.0f} s: the replica is replaced").of(
                "engine.stuck"
            )

    async def close(self) -> None:
        """Wait until no probe runs."""
        if self._probe:
            await asyncio.wait([self._probe])

    def _start_probe(self) -> asyncio.Task[None]:
        # One at a time: probes of a stuck engine would take all threads of the default pool.
        if self._probe is None or self._probe.done():
            self._probe, self._probe_began_s = asyncio.create_task(self._run()), self._clock()
        return self._probe

    async def _run(self) -> None:
        self.probe_s = await asyncio.to_thread(self._timed_probe)
        self.answered()

    def _timed_probe(self) -> float:
        began_s = self._clock()
        self._run_blank()
        return self._clock() - began_s


def choose_probes(engines: Iterable[EngineHealth]) -> set[EngineHealth]:
    """Return the engines that one round of checks may probe, those with the oldest answers first.

    The total time of the probes is limited. Otherwise, checks of many idle engines would keep the cores busy.
    """
    chosen: set[EngineHealth] = set()
    for engine in sorted(filter(lambda engine: engine.is_stale, engines), key=lambda engine: engine.answered_s):
        if sum(other.probe_s for other in chosen) >= _MAX_PROBES_S:
            break
        chosen.add(engine)
    return chosen
