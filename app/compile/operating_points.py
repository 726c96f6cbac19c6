"""What a variant is worth in one setting, over the lengths that are really asked for, and what nothing beats."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from pydantic import BaseModel

from app.compile.sweep import Concurrency, Point
from app.compile.variants import Variant


class OperatingPoint(BaseModel):
    """A variant, served in batches of one size with so many streams and threads."""

    variant: Variant
    concurrency: Concurrency
    batch_size: int
    latency_ms: float
    """Of a call, the median: the mean over lengths, weighted by how many rows have each."""

    latency_p95_ms: float
    """At the slowest length."""

    throughput: float
    """Rows a second, for rows of all lengths in their shares."""

    accuracy: float
    size_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.variant}, batches of {self.batch_size}, {self.concurrency}: {self.latency_ms:.2f} ms, "
            f"{self.throughput:,.0f} rows/s"
        )


def operating_points(
    variant: Variant, accuracy: float, size_bytes: int, points: Iterable[Point], shares: Mapping[int | None, float]
) -> Iterator[OperatingPoint]:
    """Join what was measured of a variant at each length.

    Args:
        points: of the variant, in any number of settings.
        shares: the share of rows of each length that was measured.
    """

    def setting_of(point: Point) -> tuple[int, int, int]:
        return point.concurrency.streams, point.concurrency.threads, point.batch_size

    for _, group in groupby(sorted(points, key=setting_of), key=setting_of):
        measured = list(group)
        weights = [shares[each.length] for each in measured]
        total = sum(weights)
        yield OperatingPoint(
            variant=variant,
            concurrency=measured[0].concurrency,
            batch_size=measured[0].batch_size,
            latency_ms=sum(w * each.latency_ms for w, each in zip(weights, measured, strict=True)) / total,
            latency_p95_ms=max(each.latency_p95_ms for each in measured),
            throughput=total / sum(w / each.throughput for w, each in zip(weights, measured, strict=True)),
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
