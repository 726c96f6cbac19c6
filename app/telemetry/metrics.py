"""Metrics for Prometheus: counts that the parts keep as plain numbers, handed to Ray now and then.

Ray exports the values that its processes report. A report takes about 2 µs a number. Ray's histograms take as long for
each observed value, in the process and again in the node's agent. So no request is reported alone: the parts count, and
``Publisher`` reports the sums on a timer.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, Protocol

from app.best_effort import BestEffort, repeat_in_background

INTERVAL_S = 5.0
"""Interval of reports. Ray exports every 10 s, and drops a gauge that was not set for 20 s."""

LATENCY_BOUNDS_S = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0,
    10.0, 30.0,
)  # fmt: skip
"""Upper bounds of a latency's buckets, in seconds. Between 1 and 100 ms a bound is at most twice the one before."""
ROWS_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


class Kind(StrEnum):
    """The Prometheus type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """A metric, as the table in ``docs/reference/metrics.md`` describes it."""

    name: str
    """Without the ``ray_`` that Ray puts before it, and the ``_total`` that it puts behind a counter."""
    kind: Kind
    description: str
    labels: tuple[str, ...] = ()

    @property
    def exported(self) -> str:
        """The name in Prometheus. The series of a histogram have ``_bucket``, ``_sum`` and ``_count`` behind it."""
        return f"ray_{self.name}{'_total' if self.kind is Kind.COUNTER else ''}"

    def of(self, value: float, *labels: str) -> "Sample":
        """Return a value of the metric, with the values of its labels in their order."""
        return Sample(self, labels, value)


@dataclass(frozen=True, slots=True)
class Sample:
    """A counter's sum since its process began, or a gauge's value."""

    metric: Metric
    labels: tuple[str, ...]
    value: float

    def points(self) -> Iterator["Point"]:
        """Yield the one series that Ray has of it."""
        yield Point(self.metric.name, self.metric, self.metric.labels, self.labels, self.value)


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram so far: how many values lie in each bucket, and their sum."""

    metric: Metric
    labels: tuple[str, ...]
    bounds: Sequence[float]
    counts: Sequence[int]
    """One more than there are bounds: the last bucket is for larger values."""
    total: float

    def points(self) -> Iterator["Point"]:
        """Yield the series that Prometheus expects of it."""
        metric, names = self.metric, (*self.metric.labels, "le")
        below = list(accumulate(self.counts))
        for bound, count in zip([*map("{:g}".format, self.bounds), "+Inf"], below, strict=True):
            yield Point(f"{metric.name}_bucket", metric, names, (*self.labels, bound), count)
        yield Point(f"{metric.name}_count", metric, metric.labels, self.labels, below[-1])
        yield Point(f"{metric.name}_sum", metric, metric.labels, self.labels, self.total)


@dataclass(frozen=True, slots=True)
class Point:
    """A series of Ray's, and its value."""

    name: str
    metric: Metric
    label_names: tuple[str, ...]
    labels: tuple[str, ...]
    value: float


Publish = Callable[[Iterable[Sample]], None]
"""Takes all current values of a process, as ``Publisher.publish`` does."""


class Api(Protocol):
    """The part of ``ray.util.metrics`` and ``ray.serve.metrics`` that is needed."""

    Counter: Any
    Gauge: Any


class Publisher:
    """Gives Ray the current values. A metric is created at its first value.

    Ray has no histogram that takes counts. So each series of a histogram is a gauge in Ray, with a histogram's names.
    Prometheus computes rates and quantiles from them as usual.
    """

    def __init__(self, api: Api) -> None:
        """``api`` is the module that has Ray's metrics: that of Serve in a replica, which adds the replica's name."""
        self._api = api
        self._instruments: dict[str, Any] = {}
        self._counted: dict[tuple[str, tuple[str, ...]], float] = {}
        """The value that Ray has of each counter."""
        self._values: list[Sample | Distribution] = []
        self._lock = threading.Lock()

    def publish(self, values: Iterable[Sample | Distribution]) -> None:
        """Give Ray all current values of this process. Ray drops a gauge without a value."""
        with self._lock:
            self._values = list(values)
            self._report()

    def repeat(self) -> None:
        """Give Ray the last values again. It drops gauges, and so histograms, that are not set again."""
        with self._lock:
            self._report()

    def _report(self) -> None:
        for point in (point for value in self._values for point in value.points()):
            self._set_or_increment(point)

    def _set_or_increment(self, point: Point) -> None:
        is_counter = point.metric.kind is Kind.COUNTER
        if point.name not in self._instruments:
            kind = self._api.Counter if is_counter else self._api.Gauge
            self._instruments[point.name] = kind(point.name, point.metric.description, point.label_names)
        instrument, labels = self._instruments[point.name], dict(zip(point.label_names, point.labels, strict=True))
        if not is_counter:
            instrument.set(point.value, labels)
            return
        before = self._counted.get((point.name, point.labels), 0.0)
        self._counted[point.name, point.labels] = point.value
        if increment := point.value - before if point.value >= before else point.value:  # lower: the counter was reset
            instrument.inc(increment, labels)


@contextmanager
def publishing(api: Api, work: str = "training") -> Iterator[Publish]:
    """Yield ``Publisher.publish``, and repeat its values until the block ends, even if they do not change.

    Args:
        work: named in the log as continuing if metrics cannot be repeated.
    """
    publisher, repeating = Publisher(api), BestEffort("metrics cannot be repeated", work)
    with repeat_in_background(lambda: repeating(publisher.repeat), INTERVAL_S, name="metrics"):
        yield publisher.publish
