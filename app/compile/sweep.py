"""How fast an engine is: by the rows of a batch, their length, and how cores are shared between batches at once."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel

from app.engines.base import Engine
from app.tensors import Tensors

_FEWEST_CALLS = 5


@dataclass(frozen=True)
class Cores:
    """How cores are shared: so many batches at once, each with so many threads."""

    threads: int
    streams: int


class Point(BaseModel):
    """What one setting came to, with every stream always busy."""

    threads: int
    streams: int
    batch_size: int
    length: int | None
    """Of each row, in tokens; None for inputs of one size."""

    latency_ms: float
    """Of a call, the median."""

    latency_p95_ms: float
    throughput: float
    """Rows a second, of all streams."""


def shares_of(cores: int) -> list[Cores]:
    """Every way to give all cores to streams with as many threads each, most streams first."""
    return [Cores(threads, cores // threads) for threads in range(1, cores + 1) if cores % threads == 0]


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def sweep(
    open_engine: Callable[[Cores], Engine],
    cores: int,
    batch_sizes: Sequence[int],
    rows_by_length: dict[int | None, Tensors],
    seconds: float,
) -> Iterator[Point]:
    """Measure every setting, for about ``seconds`` each.

    Args:
        open_engine: opens the model with so many streams and threads; it is closed here.
        rows_by_length: for each length some rows of it, which are repeated up to the size of a batch.
    """
    for share in shares_of(cores):
        engine = open_engine(share)
        try:
            for length, rows in rows_by_length.items():
                for size in batch_sizes:
                    batch = {name: np.resize(array, (size, *array.shape[1:])) for name, array in rows.items()}
                    yield _measure(engine, share, batch, size, length, seconds)
        finally:
            engine.close()


def _measure(engine: Engine, share: Cores, batch: Tensors, size: int, length: int | None, seconds: float) -> Point:
    engine.infer(batch)  # the first call of a shape allocates

    def call_for_a_while(_: int) -> list[float]:
        times: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) < _FEWEST_CALLS or time.perf_counter() < end:
            began = time.perf_counter()
            engine.infer(batch)
            times.append(time.perf_counter() - began)
        return times

    with ThreadPoolExecutor(share.streams) as callers:
        by_stream = list(callers.map(call_for_a_while, range(share.streams)))
    times = np.concatenate(by_stream)
    return Point(
        threads=share.threads,
        streams=share.streams,
        batch_size=size,
        length=length,
        latency_ms=round(1e3 * float(np.median(times)), 3),
        latency_p95_ms=round(1e3 * float(np.percentile(times, 95)), 3),
        throughput=round(sum(size * len(each) / sum(each) for each in by_stream), 1),
    )
