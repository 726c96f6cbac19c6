"""The engine's calls, off the event loop."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

from app.errors import EngineError
from app.serving.batching.rows import join
from app.serving.batching.statistics import ComputeTime
from app.tensors import Tensors

Infer = Callable[[Tensors], Tensors]


@dataclass(frozen=True)
class Outcome:
    """The result of a call, and its duration."""

    answer: Tensors | Exception
    time: ComputeTime


Done = Callable[[Outcome], None]


class Slots(Protocol):
    """Where calls run: as many at once as the engine has streams."""

    def start(self, parts: Sequence[Tensors], done: Done) -> None:
        """Run the rows of all parts in one call once a slot is free, and have the event loop call ``done``."""
        ...

    def close(self) -> None:
        """Take no more calls."""
        ...


def call(infer: Infer, parts: Sequence[Tensors]) -> Outcome:
    """Run the rows of all parts in one call.

    Nothing is raised: the outcome holds what ``infer`` raised, or an EngineError if the answer has too many or too few
    rows.
    """
    began_s = time.perf_counter()
    try:
        inputs = join(parts)
        joined_s = time.perf_counter()
        outputs = _run(infer, inputs)
        inferred_s = time.perf_counter()
        _check_rows(outputs, len(next(iter(inputs.values()))))
    except Exception as error:  # the batcher passes it to the requests
        return Outcome(error, ComputeTime())
    return Outcome(outputs, ComputeTime(joined_s - began_s, inferred_s - joined_s, time.perf_counter() - inferred_s))


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
    """A thread for each slot.

    ``concurrent.futures`` would do the same at several times the cost of the hand-over.
    """

    def __init__(self, infer: Infer, slots: int) -> None:
        self._infer = infer
        self._slots = slots
        self._work: SimpleQueue[tuple[asyncio.AbstractEventLoop, Sequence[Tensors], Done] | None] = SimpleQueue()
        for slot in range(slots):
            Thread(target=self._run, name=f"engine-{slot}", daemon=True).start()

    def start(self, parts: Sequence[Tensors], done: Done) -> None:
        self._work.put((asyncio.get_running_loop(), parts, done))

    def close(self) -> None:
        for _ in range(self._slots):
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            loop, parts, done = work
            outcome = call(self._infer, parts)
            with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits for the answer
                loop.call_soon_threadsafe(done, outcome)
            del work, parts, done, outcome  # else they live on until the next call
