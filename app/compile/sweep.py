"""How fast an engine is: by the rows of a batch, their length, and how cores are shared between batches at once."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel

from app.compile.subject import resized
from app.engines.architecture import Device
from app.engines.base import Engine
from app.tensors import Tensors

_SETTING_S = 0.05
"""So long a setting is measured at least."""

_GPU_STREAMS = (1, 2, 4)


@dataclass(frozen=True)
class Concurrency:
    """How a machine is shared: so many batches at once, each with so many threads."""

    threads: int
    streams: int

    def __str__(self) -> str:
        return f"{self.streams} at once on {self.threads} thread{'s' * (self.threads > 1)} each"


class Point(BaseModel):
    """What one setting came to at one length, with every stream always busy."""

    concurrency: Concurrency
    batch_size: int
    length: int | None
    """Of each row, in tokens; None for inputs of one size."""

    latency_ms: float
    """Of a call, the median."""

    latency_p95_ms: float
    throughput: float
    """Rows a second, of all streams."""


def concurrencies(device: Device, cores: int) -> list[Concurrency]:
    """Every way to share all cores evenly between streams, fewest streams first; on a GPU a few streams."""
    if device == "gpu":
        return [Concurrency(1, streams) for streams in _GPU_STREAMS]
    return [Concurrency(cores // streams, streams) for streams in range(1, cores + 1) if cores % streams == 0]


def measure(
    engine: Engine,
    concurrency: Concurrency,
    batch_sizes: Sequence[int],
    rows_by_length: Mapping[int | None, Tensors],
    fewest_calls: int,
) -> Iterator[Point]:
    """Measure an engine that was opened for ``concurrency``, at every batch size and length.

    Args:
        rows_by_length: for each length some rows of it, which are repeated up to the size of a batch.
        fewest_calls: of each stream in each setting.
    """
    for length, rows in rows_by_length.items():
        for size in batch_sizes:
            by_stream = _busy(engine, concurrency.streams, resized(rows, size), fewest_calls)
            times = np.concatenate(by_stream)
            yield Point(
                concurrency=concurrency,
                batch_size=size,
                length=length,
                latency_ms=round(1e3 * float(np.median(times)), 3),
                latency_p95_ms=round(1e3 * float(np.percentile(times, 95)), 3),
                throughput=round(sum(size * len(each) / sum(each) for each in by_stream), 1),
            )


def _busy(engine: Engine, streams: int, batch: Tensors, fewest_calls: int) -> list[list[float]]:
    """The seconds of each call, of as many callers as there are streams."""
    together = threading.Barrier(streams)

    def call_once(_: int) -> None:
        together.wait()  # so that each stream has a call
        engine.infer(batch)

    def call_for_a_while(_: int) -> list[float]:
        times: list[float] = []
        end = time.perf_counter() + _SETTING_S
        while len(times) < fewest_calls or time.perf_counter() < end:
            began = time.perf_counter()
            engine.infer(batch)
            times.append(time.perf_counter() - began)
        return times

    with ThreadPoolExecutor(streams) as callers:
        list(callers.map(call_once, range(streams)))  # a stream's first call of a shape allocates
        return list(callers.map(call_for_a_while, range(streams)))
