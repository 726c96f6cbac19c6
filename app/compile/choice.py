"""Choose the variant to publish and its serving settings, by the recipe's objective and the measurements."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from app.compile.records import PublishedScore, VariantRecord
from app.compile.timing import OperatingPoint, Point
from app.config import ObjectiveConfig
from app.errors import CompileError
from app.repository.manifest import ServingDefaults

_ABOUT_AS_FAST = 0.95
"""Share of the highest throughput that counts as equally fast.

Smaller differences are within the noise, and fewer, larger calls cost less work outside the engine.
"""

AnyPoint = TypeVar("AnyPoint", Point, OperatingPoint)


@dataclass(frozen=True)
class Choice:
    """The variant to publish, and how to serve it."""

    record: VariantRecord
    point: OperatingPoint
    """The best setting of the variant."""

    serving: ServingDefaults
    accuracy: PublishedScore | None


def ranked(points: Sequence[OperatingPoint], objective: ObjectiveConfig) -> list[OperatingPoint]:
    """Sort points by the objective, best first. Points over its latency limit come last, the fastest of them first.

    For minimum latency only the smallest measured batch size counts, which is usually one row.
    """
    if objective.goal == "min_latency":
        # In a larger batch the first row waits for the others.
        smallest = min(point.batch_size for point in points)
        return sorted((point for point in points if point.batch_size == smallest), key=lambda point: point.latency_ms)
    return _fastest_first(points, objective)


def best_at_length(points: Sequence[Point], objective: ObjectiveConfig) -> Point:
    """Return the point whose batch size becomes the maximum at one length.

    For throughput it is the fastest point within the latency limit. For minimum latency it is the largest size that is
    about as fast as the fastest: the maximum matters only when many requests wait.

    Args:
        points: the measurements of every batch size at this length.
    """
    fastest = _fastest_first(points, objective)[0]
    if objective.goal == "max_throughput":
        return fastest
    about_as_fast = [point for point in points if point.throughput >= _ABOUT_AS_FAST * fastest.throughput]
    return max(about_as_fast, key=lambda point: point.batch_size)


def best_point(points: Sequence[OperatingPoint], objective: ObjectiveConfig) -> OperatingPoint:
    """Return the best point.

    Raises:
        CompileError: no point is within the latency limit.
    """
    best = ranked(points, objective)[0]
    if objective.latency_ms is not None and best.latency_p95_ms > objective.latency_ms:
        raise CompileError(
            f"compile.objective.latency_ms is {objective.latency_ms:g}, and the fastest setting takes "
            f"{best.latency_p95_ms:.2f} ms ({best}): allow more, or give a smaller model"
        ).of("objective.unreachable", "compile.objective.latency_ms")
    return best


def serving_defaults(
    chosen: OperatingPoint, points: Sequence[OperatingPoint], objective: ObjectiveConfig
) -> ServingDefaults:
    """Return the serving settings of the chosen point. Its streams become replicas.

    For minimum latency, a batch holds the requests that wait when the engine becomes free, and no request is held back.
    For throughput, requests are held back for a batch of the point's size. In both cases ``best_at_length`` limits the
    rows of a call at each length.
    """
    for_throughput = objective.goal == "max_throughput"
    # Other streams or threads would mean another engine.
    same_setting = [point for point in points if _variant_and_streams(point) == _variant_and_streams(chosen)]
    full = chosen if for_throughput else _full_call(same_setting)
    return ServingDefaults(
        max_batch_size=full.batch_size,
        max_batch_size_by_length=full.batch_sizes,
        preferred_batch_sizes=(chosen.batch_size,) if for_throughput and chosen.batch_size > 1 else (),
        timeout_us=round(1e3 * _wait_ms(chosen, same_setting, objective)) if for_throughput else 0,
        replicas=chosen.concurrency.streams,
        threads=chosen.concurrency.threads,
    )


def _fastest_first(points: Sequence[AnyPoint], objective: ObjectiveConfig) -> list[AnyPoint]:
    """Sort points by throughput. Those over the latency limit come last, sorted by p95 latency."""
    limit_ms = objective.latency_ms

    def order(point: AnyPoint) -> tuple[bool, float]:
        is_late = limit_ms is not None and point.latency_p95_ms > limit_ms
        # Among late points the least late is best, whatever its throughput.
        return is_late, point.latency_p95_ms if is_late else -point.throughput

    return sorted(points, key=order)


def _full_call(points: Sequence[OperatingPoint]) -> OperatingPoint:
    """Return the point whose sizes were chosen by length. Without one, return that of the largest batch size."""
    return max(points, key=lambda point: (bool(point.batch_sizes), point.batch_size))


def _wait_ms(chosen: OperatingPoint, same_setting: Sequence[OperatingPoint], objective: ObjectiveConfig) -> float:
    """Return how long a batch may wait: for the time that batching saves.

    The last row is then answered no later than if all rows had run one after another. The wait is never longer than the
    call itself, or than the latency limit allows.
    """
    smallest = min(same_setting, key=lambda point: point.batch_size)
    saved = chosen.latency_ms * (chosen.throughput / smallest.throughput - 1)
    left = float("inf") if objective.latency_ms is None else objective.latency_ms - chosen.latency_p95_ms
    return max(0.0, min(saved, chosen.latency_ms, left))


def _variant_and_streams(point: OperatingPoint) -> tuple[object, ...]:
    return point.variant, point.concurrency
