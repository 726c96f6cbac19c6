"""What a worker does now, said in one place: the watchdog, a profiler and a clock hear of it."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from app.storage import Advance, no_op
from app.telemetry.phases import Phase, phase

_WORDS = {
    Phase.DATA: "reading data",
    Phase.FORWARD: "the forward pass",
    Phase.BACKWARD: "the backward pass",
    Phase.OPTIMIZER: "the optimizer's step",
}


class Activity:
    """Follows one worker through its work, phase after phase."""

    def __init__(self, beat: Callable[[str], None] = no_op, advance: Advance = no_op) -> None:
        """``beat`` is told what the worker begins, each time it has come out of what was before.

        ``advance`` is told that this goes on.
        """
        self._beat, self.advance = beat, advance
        self._is_whole = False
        self._seconds = dict.fromkeys(Phase, 0.0)

    def begin(self, doing: str) -> None:
        """Say what the worker does next, where no phase says it."""
        self._beat(doing)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """What is inside is one phase of a step; phases do not lie inside one another."""
        if not self._is_whole:
            self._beat(_WORDS[name])
        began = time.monotonic()
        with phase(name):
            yield
        self._seconds[name] += time.monotonic() - began

    @contextmanager
    def whole(self, doing: str) -> Iterator[None]:
        """What is inside is one piece to the others: not all workers go through the same phases of it."""
        self._beat(doing)
        self._is_whole = True
        yield
        self._is_whole = False

    def start_clock(self) -> Mapping[Phase, float]:
        """Seconds in each phase from now on, until the clock is started again."""
        self._seconds = dict.fromkeys(Phase, 0.0)
        return self._seconds
