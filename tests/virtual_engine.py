"""An engine whose calls take time that nobody waits for: the event loop puts its clock forward instead."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from app.serving.batching.batcher import Batcher, CallResult, CallSource, Check, Infer, call
from app.serving.batching.scheduler import BatchingPolicy, RequestBatch
from app.serving.batching.statistics import ComputeTime
from app.tensors import Tensors

Result = TypeVar("Result")

_LATER_S = 1e-9
"""After a time, so that the clock is past it however its numbers are rounded."""


class _Selector(selectors.DefaultSelector):
    """Does not wait, but puts the clock forward by as much."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "everything waits, and no timer will wake it"
            self.now_s += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock starts at 0 s."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s

    def pass_time(self, seconds: float) -> None:
        """Keep the loop busy for so long."""
        self._virtual.now_s += seconds


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run to the end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def row(value: float, rows: int = 1, length: int = 1) -> Tensors:
    """A request whose rows are all of one value."""
    return {"x": np.full((rows, length), float(value))}


@dataclass(frozen=True)
class Answered:
    """What became of a request, and when."""

    at_s: float
    values: list[float] | None = None
    error: Exception | None = None


class VirtualEngine:
    """Answers twice what it is given, and notes each call. It fails on a call with a negative value in it.

    A call of n rows takes ``row_s * n + call_s`` seconds, including ``input_s`` and ``output_s``.
    """

    def __init__(self, call_s: float, row_s: float = 0.0, input_s: float = 0.0, output_s: float = 0.0) -> None:
        self.call_s = call_s
        self.row_s = row_s
        self.input_s = input_s
        self.output_s = output_s
        self.started_s: list[float] = []
        self.calls: list[list[float]] = []
        """The values of each."""

    @property
    def sizes(self) -> list[int]:
        """The rows of each call."""
        return [len(values) for values in self.calls]

    def infer(self, tensors: Tensors) -> Tensors:
        """As the batcher wants it."""
        x = tensors["x"]
        self.started_s.append(round(asyncio.get_running_loop().time(), 6))
        self.calls.append([float(value) for value in x[:, 0]])
        if (x < 0).any():
            raise FloatingPointError(f"{x.min()} is negative")
        return {"twice": 2 * x}

    def batcher(self, slots: int = 1, **knobs: Any) -> Batcher:
        """One in front of this engine, for the running loop."""
        clock = asyncio.get_running_loop().time
        return Batcher(self.infer, BatchingPolicy(**knobs), slots, max_on_loop_s=0.0, threads=self._slots, clock=clock)

    def _slots(self, calls: CallSource, infer: Infer, check: Check, slots: int) -> "_VirtualSlots":
        return _VirtualSlots(calls, lambda batch: call(infer, check, batch), slots, self._time)

    def _time(self, rows: int) -> ComputeTime:
        seconds = self.row_s * rows + self.call_s
        return ComputeTime(self.input_s, seconds - self.input_s - self.output_s, self.output_s)


class _VirtualSlots:
    def __init__(
        self,
        calls: CallSource,
        run: Callable[[RequestBatch], CallResult],
        slots: int,
        time: Callable[[int], ComputeTime],
    ) -> None:
        self._calls = calls
        self._run = run
        self._free = slots
        self._time = time
        self._timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        if self._timer:
            self._timer.cancel()
        if not self._free:
            return
        chosen = self._calls.next()
        if isinstance(chosen, RequestBatch):
            self.run(chosen)
        elif chosen:
            self._timer = asyncio.get_running_loop().call_at(chosen.until_s + _LATER_S, self._next)

    def run(self, batch: RequestBatch) -> None:
        self._free -= 1
        outcome = replace(self._run(batch), time=self._time(batch.rows))
        asyncio.get_running_loop().call_later(outcome.time.total_s, self._end, batch, outcome)

    async def close(self) -> None:
        pass

    def _end(self, batch: RequestBatch, outcome: CallResult) -> None:
        self._free += 1
        self._calls.ended(batch, outcome)
        self._next()


async def ask(batcher: Batcher, at_s: float, tensors: Tensors, **options: Any) -> Answered:
    """Send a request at some time, and say what became of it."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(at_s - loop.time())
    try:
        outputs = await batcher.infer(tensors, **options)
    except Exception as error:
        return Answered(round(loop.time(), 6), error=error)
    return Answered(round(loop.time(), 6), [float(value) for value in outputs["twice"][:, 0]])
