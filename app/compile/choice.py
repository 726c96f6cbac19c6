"""Which variant is published, and how it is served: what the recipe's objective says of the measurements."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from app.compile.operating_points import OperatingPoint
from app.compile.records import PublishedAccuracy, VariantRecord
from app.compile.sweep import Point
from app.config import ObjectiveConfig
from app.errors import CompileError
from app.repository.manifest import ServingDefaults

_ABOUT = 0.95
"""Share of the highest throughput that counts as equally fast.

Smaller differences are within the noise, and fewer, larger calls cost less work outside the engine.
"""

Timed = TypeVar("Timed", Point, OperatingPoint)


@dataclass(frozen=True)
class Choice:
    """What is published."""

    record: VariantRecord
    point: OperatingPoint
    """The best setting of the variant."""

    serving: ServingDefaults
    accuracy: PublishedAccuracy


def ranked(points: Sequence[OperatingPoint], objective: ObjectiveConfig) -> list[OperatingPoint]:
    """Points by the objective, the best first; those that miss its limit last, the fastest of them first.

    The least latency is that of the smallest batch that was measured, one row as a rule.
    """
    if objective.goal == "min_latency":
        smallest = min(point.batch_size for point in points)
        return sorted((each for each in points if each.batch_size == smallest), key=lambda each: each.latency_ms)
    return _fastest_first(points, objective)


def best_at_length(points: Sequence[Point], objective: ObjectiveConfig) -> Point:
    """Return the point whose batch size becomes the maximum at one length.

    For throughput it is the fastest point within the latency limit. For minimum latency it is the largest size that is
    about as fast as the fastest: the maximum matters only when many requests wait.

    Args:
        points: of every batch size at this length.
    """
    fastest = _fastest_first(points, objective)[0]
    if objective.goal == "max_throughput":
        return fastest
    about_as_fast = [point for point in points if point.throughput >= _ABOUT * fastest.throughput]
    return max(about_as_fast, key=lambda point: point.batch_size)


def best_point(points: Sequence[OperatingPoint], objective: ObjectiveConfig) -> OperatingPoint:
    """The point that the objective asks for.

    Raises:
        CompileError: no point keeps the limit of latency.
    """
    best = ranked(points, objective)[0]
    if objective.latency_ms is not None and best.latency_p95_ms > objective.latency_ms:
        raise CompileError(
            f"compile.objective.latency_ms is {objective.latency_ms:g}, and the fastest setting takes "
            f"{best.latency_p95_ms:.2f} ms ({best}): allow more, or give a smaller model"
        )
    return best


def serving_defaults(
    chosen: OperatingPoint, points: Sequence[OperatingPoint], objective: ObjectiveConfig
) -> ServingDefaults:
    """Return how the chosen point is served; its streams become replicas.

    For minimum latency a batch is whatever waits when the engine is free, and no request waits for others. For
    throughput requests wait for a batch of the point's size. In both cases ``best_at_length`` limits the rows of a call
    at each length.
    """
    for_throughput = objective.goal == "max_throughput"
    alike = [point for point in points if _setting_but_batch(point) == _setting_but_batch(chosen)]
    full = chosen if for_throughput else _full_call(alike)
    return ServingDefaults(
        max_batch_size=full.batch_size,
        max_batch_size_by_length=full.batch_sizes,
        preferred_batch_sizes=(chosen.batch_size,) if for_throughput and chosen.batch_size > 1 else (),
        timeout_us=round(1e3 * _wait_ms(chosen, alike, objective)) if for_throughput else 0,
        replicas=chosen.concurrency.streams,
        threads=chosen.concurrency.threads,
    )


def _fastest_first(points: Sequence[Timed], objective: ObjectiveConfig) -> list[Timed]:
    """Sort points by throughput. Those over the latency limit come last, sorted by p95 latency."""
    limit_ms = objective.latency_ms

    def order(point: Timed) -> tuple[bool, float]:
        is_late = limit_ms is not None and point.latency_p95_ms > limit_ms
        return is_late, point.latency_p95_ms if is_late else -point.throughput

    return sorted(points, key=order)


def _full_call(points: Sequence[OperatingPoint]) -> OperatingPoint:
    """Return the point whose sizes were chosen by length. Without one, return that of the largest batch size."""
    return max(points, key=lambda point: (bool(point.batch_sizes), point.batch_size))


def _wait_ms(chosen: OperatingPoint, alike: Sequence[OperatingPoint], objective: ObjectiveConfig) -> float:
    """Return how long a batch may wait: as long as batching saves.

    The last row is then answered no later than if all rows had run one after another. The wait is never longer than the
    call itself, or than the latency limit allows.
    """
    smallest = min(alike, key=lambda each: each.batch_size)
    saved = chosen.latency_ms * (chosen.throughput / smallest.throughput - 1)
    left = float("inf") if objective.latency_ms is None else objective.latency_ms - chosen.latency_p95_ms
    return max(0.0, min(saved, chosen.latency_ms, left))


def _setting_but_batch(point: OperatingPoint) -> tuple[object, ...]:
    return point.variant, point.concurrency
