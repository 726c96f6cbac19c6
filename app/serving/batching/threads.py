"""The engine's calls, off the event loop."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Protocol

from app.errors import EngineError
from app.serving.batching.release import Batch, Hold
from app.serving.batching.statistics import ComputeTime
from app.tensors import Tensors, concat_rows

Infer = Callable[[Tensors], Tensors]
Check = Callable[[Tensors], object]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call, and its duration."""

    answer: Tensors | Exception
    time: ComputeTime
    is_checked: bool = False
    """Whether the answer passed the check as a whole. If not, some of its rows may pass."""


class Calls(Protocol):
    """Where slots get their calls. Both methods may be called by any thread."""

    def next(self) -> Batch | Hold | None:
        """Start the call that a free slot makes now. Else return when to ask again; None: once woken."""
        ...

    def ended(self, batch: Batch, outcome: Outcome) -> None:
        """Take the outcome of a call."""
        ...


class Slots(Protocol):
    """Where calls run: as many at once as the engine has streams."""

    def wake(self) -> None:
        """Let a free slot ask for its next call."""
        ...

    def run(self, batch: Batch) -> None:
        """Let a free slot make a call that was started for it, then ask for its next call."""
        ...

    async def close(self) -> None:
        """Ask for no more calls."""
        ...


def call(infer: Infer, check: Check, batch: Batch) -> Outcome:
    """Run the rows of a batch in one call, and check its answer.

    Nothing is raised: the outcome holds what ``infer`` raised, or an EngineError if the answer has too many or too few
    rows.
    """
    began_s = time.perf_counter()
    try:
        inputs = concat_rows([part.tensors for part in batch.parts])
        joined_s = time.perf_counter()
        outputs = _run(infer, inputs)
        inferred_s = time.perf_counter()
        _check_rows(outputs, batch.rows)
    except Exception as error:  # the batcher passes it to the requests
        return Outcome(error, ComputeTime())
    is_checked = False
    with suppress(Exception):  # the batcher checks the rows of each request
        check(outputs)
        is_checked = True
    time_taken = ComputeTime(joined_s - began_s, inferred_s - joined_s, time.perf_counter() - inferred_s)
    return Outcome(outputs, time_taken, is_checked)


def _run(infer: Infer, inputs: Tensors) -> Tensors:
    try:
        return infer(inputs)
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        # The others would end the event loop, or are refused by its futures.
        raise EngineError(f"the engine failed on a batch: it raised {type(error).__name__}") from error


def _check_rows(outputs: Tensors, rows: int) -> None:
    for name, output in outputs.items():
        if output.shape[:1] != (rows,):
            raise EngineError(f"output {name!r} has shape {list(output.shape)} for {rows} rows: expected {rows} first")


class EngineThreads:
    """A thread for each slot, which takes its next call itself: the event loop need not be free for that."""

    def __init__(self, calls: Calls, infer: Infer, check: Check, slots: int) -> None:
        self._calls = calls
        self._infer = infer
        self._check = check
        self._closed = False
        self._wakes: SimpleQueue[Batch | None] = SimpleQueue()  # a condition would take several times as long
        self._threads = [Thread(target=self._run, name=f"engine-{slot}", daemon=True) for slot in range(slots)]
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        if self._wakes.qsize() < len(self._threads):  # else each thread has a wake to take, and asks after it
            self._wakes.put(None)

    def run(self, batch: Batch) -> None:
        self._wakes.put(batch)

    async def close(self) -> None:
        """End the threads, none of which runs a call. One that still ran would keep its model alive."""
        self._closed = True
        for _ in self._threads:
            self.wake()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _run(self) -> None:
        chosen: Batch | Hold | None = None
        while not self._closed:
            if isinstance(chosen, Batch):
                self._calls.ended(chosen, call(self._infer, self._check, chosen))
                chosen = self._calls.next()
            else:
                chosen = self._wait(chosen) or self._calls.next()

    def _wait(self, hold: Hold | None) -> Batch | None:
        """Return the call that the slot was given, or None when it is to ask for one."""
        with suppress(Empty):
            return self._wakes.get(timeout=max(0.0, hold.until_s - time.monotonic()) if hold else None)
        return None
