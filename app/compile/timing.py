"""How fast an engine is in each setting: rows per batch, their length, and how cores are shared between streams."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from statistics import median

import numpy as np
from pydantic import BaseModel, Field

from app.compile.source import resized
from app.compile.variants import Variant
from app.engines.architecture import Device
from app.engines.base import Engine
from app.repository.score import Score, Scored
from app.tensors import Tensors

_MIN_SECONDS = 0.05
"""Minimum time for which a setting is measured."""

_ROUNDS = 5
"""How often ``race`` times each setting."""

_GPU_STREAMS = (1, 2, 4)

Timer = Callable[[], "OperatingPoint"]
"""Times one setting once."""


@dataclass(frozen=True)
class Concurrency:
    """How the machine's cores are shared: ``streams`` concurrent batches with ``threads`` threads each."""

    threads: int
    streams: int

    def __str__(self) -> str:
        return f"{self.streams} at once on {self.threads} thread{'s' * (self.threads > 1)} each"


class Point(BaseModel):
    """The measurement of one setting at one length, with every stream always busy."""

    concurrency: Concurrency
    batch_size: int
    length: int | None
    """Length of the rows in tokens; None for inputs of one size."""

    latency_ms: float
    """Median time of a call."""

    latency_p95_ms: float
    throughput: float
    """Rows per second of all streams together."""


def concurrencies(device: Device, cores: int) -> list[Concurrency]:
    """Return every way to share the cores evenly between streams, fewest streams first; on a GPU, a few streams."""
    if device == "gpu":
        return [Concurrency(1, streams) for streams in _GPU_STREAMS]
    return [Concurrency(cores // streams, streams) for streams in range(1, cores + 1) if cores % streams == 0]


def measure(
    engine: Engine,
    concurrency: Concurrency,
    batch_sizes: Sequence[int],
    rows_by_length: Mapping[int | None, Tensors],
    min_calls: int,
) -> Iterator[Point]:
    """Measure an engine that was opened for ``concurrency``, at every batch size and length.

    Args:
        rows_by_length: some rows of each length. They are repeated to fill a batch.
        min_calls: minimum number of calls of each stream in each setting.
    """
    for length, rows in rows_by_length.items():
        for size in batch_sizes:
            by_stream = _busy(engine, concurrency.streams, resized(rows, size), min_calls)
            times = np.concatenate(by_stream)
            yield Point(
                concurrency=concurrency,
                batch_size=size,
                length=length,
                latency_ms=round(1e3 * float(np.median(times)), 3),
                latency_p95_ms=round(1e3 * float(np.percentile(times, 95)), 3),
                throughput=round(sum(size * len(seconds) / sum(seconds) for seconds in by_stream), 1),
            )


def _busy(engine: Engine, streams: int, batch: Tensors, min_calls: int) -> list[list[float]]:
    """Call the engine from one thread per stream, and return the seconds of each call by stream."""
    barrier = threading.Barrier(streams)

    def call_once(_: int) -> None:
        barrier.wait()  # all calls run at once, so each takes another stream
        engine.run(batch)

    def call_for_a_while(_: int) -> list[float]:
        times: list[float] = []
        end = time.perf_counter() + _MIN_SECONDS
        while len(times) < min_calls or time.perf_counter() < end:
            began = time.perf_counter()
            engine.run(batch)
            times.append(time.perf_counter() - began)
        return times

    with ThreadPoolExecutor(streams) as callers:
        # The first call of a shape allocates memory in the stream.
        list(callers.map(call_once, range(streams)))
        return list(callers.map(call_for_a_while, range(streams)))


class OperatingPoint(Scored):
    """A variant in one setting: streams, threads, and a batch size for all lengths or for each."""

    variant: Variant
    concurrency: Concurrency
    batch_size: int
    """Rows of a call; the largest number if it depends on the length."""

    batch_sizes: dict[int, int] = Field(default={})
    """Rows of a call by length. Empty if they were not chosen by length; all lengths then have ``batch_size``."""

    latency_ms: float
    """Median time of a call: the mean over lengths, weighted by their shares of the rows."""

    latency_p95_ms: float
    """95th percentile of the time of a call, at the slowest length."""

    throughput: float
    """Rows per second, for rows of all lengths in their shares."""

    size_bytes: int

    @property
    def is_uniform(self) -> bool:
        """Whether the batch size is the same at every length."""
        return len(set(self.batch_sizes.values())) < 2

    @property
    def batches(self) -> str:
        """The batch sizes in words."""
        if self.is_uniform:
            return str(self.batch_size)
        return ", ".join(f"{size} at length {length}" for length, size in self.batch_sizes.items())

    def __str__(self) -> str:
        return (
            f"{self.variant}, batches of {self.batches}, {self.concurrency}: {self.latency_ms:.2f} ms, "
            f"{self.throughput:,.0f} rows/s"
        )


def operating_points(
    variant: Variant,
    score: Score | None,
    size_bytes: int,
    points: Iterable[Point],
    shares: Mapping[int | None, float],
    choose: Callable[[Sequence[Point]], Point],
) -> Iterator[OperatingPoint]:
    """Combine the measurements of a variant over lengths.

    Yield a point for each batch size, and one for the sizes that were chosen by length. A batch size counts only if it
    was measured at every length.

    Args:
        points: the variant's measurements, in any number of settings.
        shares: the share of rows of each length that was measured.
        choose: returns the best of the points that were measured at one length.
    """

    def streams_and_threads(point: Point) -> tuple[int, int]:
        return point.concurrency.streams, point.concurrency.threads

    for _, group in groupby(sorted(points, key=streams_and_threads), key=streams_and_threads):
        measured = sorted(group, key=lambda point: point.length or 0)
        sizes = sorted({point.batch_size for point in measured})
        # Ordered by length above, so each setting has its points in the order of the lengths.
        settings = [[point for point in measured if point.batch_size == size] for size in sizes]
        # The others failed at some length.
        settings = [setting for setting in settings if len(setting) == len(shares)]
        # Inputs of one size offer no choice of a size.
        chosen = [] if None in shares else _chosen(settings, choose)
        by_length = {point.length: point.batch_size for point in chosen}
        for setting in settings if not chosen or chosen in settings else [*settings, chosen]:
            point = combine_lengths(variant, score, size_bytes, setting, shares)
            yield point.model_copy(update={"batch_sizes": by_length}) if setting == chosen else point


def _chosen(settings: Sequence[Sequence[Point]], choose: Callable[[Sequence[Point]], Point]) -> list[Point]:
    """Return the chosen point at each length, shortest first.

    Shorter rows never get a smaller size than longer ones. Without this bound, noise would decide between sizes that
    are about equally fast.

    Args:
        settings: the points of each batch size, shortest length first.
    """
    chosen: list[Point] = []
    # From the longest on, so that each size bounds those of shorter rows.
    for points in reversed(list(zip(*settings, strict=True))):
        min_size = chosen[0].batch_size if chosen else 1
        chosen.insert(0, choose([point for point in points if point.batch_size >= min_size]))
    return chosen


def combine_lengths(
    variant: Variant,
    score: Score | None,
    size_bytes: int,
    points: Sequence[Point],
    shares: Mapping[int | None, float],
) -> OperatingPoint:
    """Return the operating point of one setting. ``points`` has its point at each length."""
    weights = [shares[point.length] for point in points]
    total = sum(weights)
    return OperatingPoint(
        variant=variant,
        concurrency=points[0].concurrency,
        batch_size=max(point.batch_size for point in points),
        latency_ms=sum(w * point.latency_ms for w, point in zip(weights, points, strict=True)) / total,
        # The slowest length bounds all rows. A mean of percentiles would be no percentile.
        latency_p95_ms=max(point.latency_p95_ms for point in points),
        # A harmonic mean, because rows of each length take their own time.
        throughput=total / sum(w / point.throughput for w, point in zip(weights, points, strict=True)),
        score=score,
        size_bytes=size_bytes,
    )


def pareto_front(points: Sequence[OperatingPoint]) -> list[OperatingPoint]:
    """Return the points that no other point dominates in score, latency, throughput and size."""
    return [point for point in points if not any(_dominates(other, point) for other in points)]


def _dominates(one: OperatingPoint, other: OperatingPoint) -> bool:
    """Return True if ``one`` is nowhere worse and somewhere better."""
    qualities, others = _qualities(one), _qualities(other)
    return qualities != others and all(a >= b for a, b in zip(qualities, others, strict=True))


def _qualities(point: OperatingPoint) -> tuple[float, ...]:
    """Return numbers of which larger ones are better."""
    return point.score.quality if point.score else 0.0, -point.latency_ms, point.throughput, -point.size_bytes


def race(timers: Sequence[Timer]) -> list[OperatingPoint]:
    """Return the latency and throughput of each setting, as medians over rounds.

    The settings are timed in turns, so that a slow spell of the machine affects all of them. Each round begins with
    another setting.
    """
    measured: list[list[OperatingPoint]] = [[] for _ in timers]
    for first in range(_ROUNDS):
        for offset in range(len(timers)):
            index = (first + offset) % len(timers)
            measured[index].append(timers[index]())
    return [_median(points) for points in measured]


def _median(points: Sequence[OperatingPoint]) -> OperatingPoint:
    return points[0].model_copy(
        update={
            "latency_ms": median(point.latency_ms for point in points),
            "throughput": median(point.throughput for point in points),
        }
    )
