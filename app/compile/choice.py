"""Which variant is published, and how it is served: what the recipe's objective says of the measurements."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.compile.operating_points import OperatingPoint
from app.compile.records import PublishedAccuracy, VariantRecord
from app.config import ObjectiveConfig
from app.errors import CompileError
from app.repository.manifest import ServingDefaults


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
    in_time = [each for each in points if _in_time(each, objective)]
    late = [each for each in points if not _in_time(each, objective)]
    return [
        *sorted(in_time, key=lambda each: -each.throughput),
        *sorted(late, key=lambda each: each.latency_p95_ms),
    ]


def best_point(points: Sequence[OperatingPoint], objective: ObjectiveConfig) -> OperatingPoint:
    """The point that the objective asks for.

    Raises:
        CompileError: no point keeps the limit of latency.
    """
    best = ranked(points, objective)[0]
    if not _in_time(best, objective):
        raise CompileError(
            f"compile.objective.latency_ms is {objective.latency_ms:g}, and the fastest setting takes "
            f"{best.latency_p95_ms:.2f} ms ({best}): allow more, or give a smaller model"
        )
    return best


def serving_defaults(
    chosen: OperatingPoint, points: Sequence[OperatingPoint], objective: ObjectiveConfig
) -> ServingDefaults:
    """How the chosen point is served, streams as replicas.

    For the least latency a batch is what waits when the engine is free, and nothing waits for more. For throughput it
    is the batch of the point, and worth a wait.
    """
    for_throughput = objective.goal == "max_throughput"
    return ServingDefaults(
        max_batch_size=chosen.batch_size if for_throughput else max(each.batch_size for each in points),
        preferred_batch_sizes=(chosen.batch_size,) if for_throughput and chosen.batch_size > 1 else (),
        timeout_us=round(1e3 * _wait_ms(chosen, points, objective)) if for_throughput else 0,
        replicas=chosen.concurrency.streams,
        threads=chosen.concurrency.threads,
    )


def _in_time(point: OperatingPoint, objective: ObjectiveConfig) -> bool:
    return objective.latency_ms is None or point.latency_p95_ms <= objective.latency_ms


def _wait_ms(chosen: OperatingPoint, points: Sequence[OperatingPoint], objective: ObjectiveConfig) -> float:
    """As long as joining saves: the last row is answered no later than if all had run one after another.

    Never longer than the call itself, nor than the limit leaves.
    """
    alike = [each for each in points if _setting_but_batch(each) == _setting_but_batch(chosen)]
    smallest = min(alike, key=lambda each: each.batch_size)
    saved = smallest.latency_ms / smallest.batch_size * chosen.batch_size - chosen.latency_ms
    left = float("inf") if objective.latency_ms is None else objective.latency_ms - chosen.latency_p95_ms
    return max(0.0, min(saved, chosen.latency_ms, left))


def _setting_but_batch(point: OperatingPoint) -> tuple[object, ...]:
    return point.variant, point.concurrency
