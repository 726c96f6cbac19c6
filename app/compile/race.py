"""A decision between settings near each other: timed in turns, so that a slow spell of the machine meets them all."""

from collections.abc import Callable, Sequence
from statistics import median

from app.compile.operating_points import OperatingPoint

Timer = Callable[[], OperatingPoint]
"""Times one setting once."""

_ROUNDS = 5


def race(timers: Sequence[Timer]) -> list[OperatingPoint]:
    """The latency and throughput of each setting, as medians over rounds; each round begins with another setting."""
    seen: list[list[OperatingPoint]] = [[] for _ in timers]
    for number in range(_ROUNDS):
        for place in range(len(timers)):
            index = (number + place) % len(timers)
            seen[index].append(timers[index]())
    return [_middle(points) for points in seen]


def _middle(points: Sequence[OperatingPoint]) -> OperatingPoint:
    return points[0].model_copy(
        update={
            "latency_ms": median(each.latency_ms for each in points),
            "throughput": median(each.throughput for each in points),
        }
    )
