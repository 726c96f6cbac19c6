"""Threads that run the engine's calls off the event loop, and a timer on it."""

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Protocol

from app.errors import EngineError
from app.serving.batching.release import Hold, RequestBatch
from app.serving.batching.statistics import ComputeTime
from app.tensors import Tensors, concat_rows

Infer = Callable[[Tensors], Tensors]
Check = Callable[[Tensors], object]


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call, and its duration."""

    answer: Tensors | Exception
    time: ComputeTime
    ended_s: float
    """On the clock ``time.monotonic``."""
    is_checked: bool = False
    """Whether the answer passed the check as a whole. If not, some of its rows may pass."""


class CallSource(Protocol):
    """The source of the slots' calls. Any thread may call its methods."""

    def next(self) -> RequestBatch | Hold | None:
        """Start the next call of a free slot. Without one, return when to ask again; None means once woken."""
        ...

    def ended(self, batch: RequestBatch, outcome: CallResult) -> None:
        """Take the outcome of a call."""
        ...


class Slots(Protocol):
    """The slots that run calls, one for each stream of the engine."""

    def wake(self) -> None:
        """Let a free slot ask for its next call."""
        ...

    def run(self, batch: RequestBatch) -> None:
        """Let a free slot run a call that was started for it, and then ask for its next call."""
        ...

    async def close(self) -> None:
        """Ask for no more calls."""
        ...


def call(infer: Infer, check: Check, batch: RequestBatch) -> CallResult:
    """Run a batch in one call, and check its answer.

    Nothing is raised. The result contains the error of ``infer``, or an EngineError if the number of rows is wrong.
    """
    # All three are set, because a failed call has a time, too.
    began_s = batched_s = inferred_s = time.perf_counter()
    try:
        inputs = concat_rows([part.tensors for part in batch.parts])
        batched_s = time.perf_counter()
        try:
            outputs = _run(infer, inputs)
        finally:
            inferred_s = time.perf_counter()
        _check_rows(outputs, batch.rows)
    except Exception as error:  # the batcher passes it to the requests
        return CallResult(error, ComputeTime(batched_s - began_s, inferred_s - batched_s), time.monotonic())
    is_checked = False
    with suppress(Exception):  # the batcher checks the rows of each request
        check(outputs)
        is_checked = True
    time_taken = ComputeTime(batched_s - began_s, inferred_s - batched_s, time.perf_counter() - inferred_s)
    return CallResult(outputs, time_taken, time.monotonic(), is_checked)


def _run(infer: Infer, inputs: Tensors) -> Tensors:
    try:
        return infer(inputs)
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        # KeyboardInterrupt and the like would end the event loop, and its futures refuse a StopIteration.
        raise EngineError(f"the engine failed on a batch: it raised {type(error).__name__}") from error


def _check_rows(outputs: Tensors, rows: int) -> None:
    for name, output in outputs.items():
        if output.shape[:1] != (rows,):
            raise EngineError(f"output {name!r} has shape {list(output.shape)} for {rows} rows: expected {rows} first")


class EngineThreads:
    """One thread per slot. A thread takes its next call itself, so the event loop need not be free for that."""

    def __init__(self, calls: CallSource, infer: Infer, check: Check, slots: int) -> None:
        self._calls = calls
        self._infer = infer
        self._check = check
        self._closed = False
        # This queue is several times as fast as a condition.
        self._wakes: SimpleQueue[RequestBatch | None] = SimpleQueue()
        # Daemons: a call that never returns must not keep a replica's process alive.
        self._threads = [Thread(target=self._run, name=f"engine-{slot}", daemon=True) for slot in range(slots)]
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        if self._wakes.qsize() < len(self._threads):
            # Otherwise every thread will ask again anyway.
            self._wakes.put(None)

    def run(self, batch: RequestBatch) -> None:
        self._wakes.put(batch)

    async def close(self) -> None:
        """End the threads, which run no calls now. A thread that stayed would keep its model in memory."""
        # First the flag, then the wakes: a thread that wakes has to see it.
        self._closed = True
        for _ in self._threads:
            self.wake()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _run(self) -> None:
        chosen: RequestBatch | Hold | None = None
        while not self._closed:
            if isinstance(chosen, RequestBatch):
                # This frees the slot, so that ``next`` may fill it again.
                self._calls.ended(chosen, call(self._infer, self._check, chosen))
                chosen = self._calls.next()
            else:
                chosen = self._wait(chosen) or self._calls.next()

    def _wait(self, hold: Hold | None) -> RequestBatch | None:
        """Return the call that the slot was given; None if the slot has to ask for one."""
        with suppress(Empty):
            return self._wakes.get(timeout=max(0.0, hold.until_s - time.monotonic()) if hold else None)
        return None


class Alarm:
    """A timer on the event loop that fires once, at the earliest of the times that were set."""

    def __init__(self, ring: Callable[[float], None]) -> None:
        """Call ``ring`` with the time that was set."""
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = math.inf

    def set(self, due_s: float, now_s: float) -> None:
        """Ring at ``due_s``, unless the alarm rings before."""
        if due_s >= self._due_s:
            return
        self.cancel()
        self._due_s = due_s
        # The delay is a difference, because the clock of the batcher need not be the loop's.
        self._timer = asyncio.get_running_loop().call_later(due_s - now_s, self._on_timer)

    def cancel(self) -> None:
        """Forget the time that was set."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due_s = None, math.inf

    def _on_timer(self) -> None:
        due_s, self._timer, self._due_s = self._due_s, None, math.inf
        self._ring(due_s)
