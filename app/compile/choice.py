"""Which variant is published, and how it is served: what the recipe's objective says of the measurements."""

from collections.abc import Sequence

from app.compile.sweep import Point
from app.config import ObjectiveConfig
from app.errors import CompileError

_LEAST_WAIT_US = 100
"""Less than this to wait for more requests is no use: joining them takes as long."""


def best_point(points: Sequence[Point], objective: ObjectiveConfig) -> Point:
    """The setting that the objective asks for: the least latency of one row, or the most rows a second in time.

    Raises:
        CompileError: no setting keeps the limit of latency.
    """
    if objective.goal == "min_latency":
        smallest = min(point.batch_size for point in points)
        return min((each for each in points if each.batch_size == smallest), key=lambda each: each.latency_ms)
    limit = objective.latency_ms
    in_time = [each for each in points if limit is None or each.latency_p95_ms <= limit]
    if not in_time:
        fastest = min(each.latency_p95_ms for each in points)
        raise CompileError(
            f"compile.objective.latency_ms is {limit}, and the fastest setting takes {fastest} ms: allow more, or "
            "give a smaller model"
        )
    return max(in_time, key=lambda each: each.throughput)
