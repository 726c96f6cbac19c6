"""The activity of a worker, reported once to the watchdog, to a profiler and to a clock."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from app.storage import ProgressCallback, no_op
from app.telemetry.step_time import Phase, phase

_DESCRIPTIONS = {
    Phase.DATA: "reading data",
    Phase.FORWARD: "the forward pass",
    Phase.BACKWARD: "the backward pass",
    Phase.OPTIMIZER: "the optimizer's step",
}


class Activity:
    """Follows one worker through its work, phase after phase."""

    def __init__(self, beat: Callable[[str], None] = no_op, on_progress: ProgressCallback = no_op) -> None:
        """``beat`` is called with a description each time that an activity begins, and the last one has ended.

        ``on_progress`` is called while an activity makes progress.
        """
        self._beat, self.report_progress = beat, on_progress
        self._is_undivided = False
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._totals: defaultdict[str, float] = defaultdict(float)

    def begin(self, activity: str) -> None:
        """Report the next activity, if it is not a phase."""
        self._beat(activity)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Report the block as one phase of a step. Phases cannot be nested."""
        if not self._is_undivided:
            self._beat(_DESCRIPTIONS[name])
        began = time.monotonic()
        # The profiler sees the same phases.
        with phase(name):
            yield
        self._seconds[name] += time.monotonic() - began

    @contextmanager
    def undivided(self, activity: str) -> Iterator[None]:
        """Report the block as one activity. Not all workers go through the same phases of it."""
        self._beat(activity)
        self._is_undivided = True
        yield
        self._is_undivided = False

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the time of the block under ``name``."""
        began = time.monotonic()
        yield
        self._totals[name] += time.monotonic() - began

    def end_step(self, seconds: float) -> None:
        """Count the phases of a step that took ``seconds``, and what of it was in none of them."""
        for name, in_phase in self._seconds.items():
            self._totals[name.name.lower()] += in_phase
        self._totals["rest_of_step"] += seconds - sum(self._seconds.values())

    def take_totals(self) -> dict[str, float]:
        """Return the seconds counted since the last call, by what they were spent on."""
        totals, self._totals = dict(self._totals), defaultdict(float)
        return {name: round(seconds, 4) for name, seconds in totals.items()}

    def start_clock(self) -> Mapping[Phase, float]:
        """Return a mapping that counts the seconds in each phase from now on, until the next call."""
        self._seconds = dict.fromkeys(Phase, 0.0)
        return self._seconds
