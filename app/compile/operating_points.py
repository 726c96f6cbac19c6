"""What a variant is worth in one setting, over the lengths that are really asked for, and what nothing beats."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from pydantic import BaseModel

from app.compile.sweep import Concurrency, Point
from app.compile.variants import Variant


class OperatingPoint(BaseModel):
    """A variant in one setting: streams, threads, and a batch size for all lengths or for each."""

    variant: Variant
    concurrency: Concurrency
    batch_size: int
    """Rows of a call; the largest if sizes differ by length."""

    batch_sizes: dict[int, int] = {}
    """Rows of a call by length. Empty if they were not chosen by length; all lengths then have ``batch_size``."""

    latency_ms: float
    """Of a call, the median: the mean over lengths, weighted by how many rows have each."""

    latency_p95_ms: float
    """At the slowest length."""

    throughput: float
    """Rows a second, for rows of all lengths in their shares."""

    accuracy: float
    size_bytes: int

    @property
    def is_uniform(self) -> bool:
        """Whether batches have the same size at every length."""
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
    accuracy: float,
    size_bytes: int,
    points: Iterable[Point],
    shares: Mapping[int | None, float],
    choose: Callable[[Sequence[Point]], Point],
) -> Iterator[OperatingPoint]:
    """Combine the measurements of a variant over lengths.

    Yield a point for each batch size, and one for the sizes that were chosen by length. A batch size counts only if it
    was measured at every length.

    Args:
        points: of the variant, in any number of settings.
        shares: the share of rows of each length that was measured.
        choose: returns the best of the points that were measured at one length.
    """

    def streams_and_threads(point: Point) -> tuple[int, int]:
        return point.concurrency.streams, point.concurrency.threads

    for _, group in groupby(sorted(points, key=streams_and_threads), key=streams_and_threads):
        measured = sorted(group, key=lambda point: point.length or 0)
        sizes = sorted({point.batch_size for point in measured})
        settings = [[point for point in measured if point.batch_size == size] for size in sizes]
        settings = [setting for setting in settings if len(setting) == len(shares)]  # the others failed at some length
        chosen = [] if None in shares else _chosen(settings, choose)
        by_length = {point.length: point.batch_size for point in chosen}
        for setting in settings if not chosen or chosen in settings else [*settings, chosen]:
            point = joined(variant, accuracy, size_bytes, setting, shares)
            yield point.model_copy(update={"batch_sizes": by_length}) if setting == chosen else point


def _chosen(settings: Sequence[Sequence[Point]], choose: Callable[[Sequence[Point]], Point]) -> list[Point]:
    """Return the chosen point at each length, shortest first.

    Shorter rows never get a smaller size than longer ones. Without this bound, noise would decide between sizes that
    are about equally fast.

    Args:
        settings: the points of each batch size, shortest length first.
    """
    chosen: list[Point] = []
    for points in reversed(list(zip(*settings, strict=True))):
        min_size = chosen[0].batch_size if chosen else 1
        chosen.insert(0, choose([point for point in points if point.batch_size >= min_size]))
    return chosen


def joined(
    variant: Variant, accuracy: float, size_bytes: int, points: Sequence[Point], shares: Mapping[int | None, float]
) -> OperatingPoint:
    """Return the operating point of one setting. ``points`` has its point at each length."""
    weights = [shares[point.length] for point in points]
    total = sum(weights)
    return OperatingPoint(
        variant=variant,
        concurrency=points[0].concurrency,
        batch_size=max(point.batch_size for point in points),
        latency_ms=sum(w * point.latency_ms for w, point in zip(weights, points, strict=True)) / total,
        latency_p95_ms=max(point.latency_p95_ms for point in points),
        throughput=total / sum(w / point.throughput for w, point in zip(weights, points, strict=True)),
        accuracy=accuracy,
        size_bytes=size_bytes,
    )


def pareto_front(points: Sequence[OperatingPoint]) -> list[OperatingPoint]:
    """The points that no other one beats in accuracy, latency, throughput or size while it is as good in the rest."""
    return [each for each in points if not any(_beats(other, each) for other in points)]


def _beats(one: OperatingPoint, other: OperatingPoint) -> bool:
    mine, others = _goods(one), _goods(other)
    return mine != others and all(a >= b for a, b in zip(mine, others, strict=True))


def _goods(point: OperatingPoint) -> tuple[float, ...]:
    """What is better when it is more."""
    return point.accuracy, -point.latency_ms, point.throughput, -point.size_bytes
