"""Metrics for Prometheus: counts that the parts keep as plain numbers, handed to Ray now and then.

Ray exports the values that its processes report. A report takes about 2 µs a number. Ray's histograms take as long for
each observed value, in the process and again in the node's agent. So no request is reported alone: the parts count, and
``Publisher`` reports the sums on a timer.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate, zip_longest
from typing import Any, Protocol

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

    @property
    def signature(self) -> object:
        """Equal to that of a later value if nothing has changed."""
        return self.value

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

    @property
    def signature(self) -> object:
        """Equal to that of a later value if nothing has changed."""
        return sum(self.counts), self.total

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


class Api(Protocol):
    """The part of ``ray.util.metrics`` and ``ray.serve.metrics`` that is needed."""

    Counter: Any
    Gauge: Any


class Publisher:
    """Gives Ray the values that have changed. A metric is made when it has its first value.

    Ray has no histogram that takes counts. So the series of one are gauges there, with the names that histograms have:
    Prometheus computes rates and quantiles of them all the same.
    """

    def __init__(self, api: Api) -> None:
        """``api`` is the module that has Ray's metrics: that of Serve in a replica, which adds the replica's name."""
        self._api = api
        self._instruments: dict[str, Any] = {}
        self._published: dict[tuple[str, tuple[str, ...]], tuple[object, list[Point]]] = {}
        """The signature of each value, and its points as Ray has them."""

    def publish(self, values: Iterable[Sample | Distribution]) -> None:
        """Give Ray all current values of this process. A gauge without a value becomes 0."""
        missing = set(self._published)
        for value in values:
            key, signature = (value.metric.name, value.labels), value.signature
            missing.discard(key)
            before, published = self._published.get(key, (None, []))
            if signature != before:
                points = list(value.points())
                # Each report takes time, so a histogram reports only the buckets that changed.
                for point, old in zip_longest(points, published):
                    if old is None or point.value != old.value:
                        self._set_or_increment(point, old.value if old else 0.0)
                self._published[key] = signature, points
        # Ray goes on exporting the last value of a gauge that nobody sets any more.
        for key in missing:
            signature, points = self._published[key]
            if signature and points[0].metric.kind is Kind.GAUGE:
                cleared = replace(points[0], value=0.0)
                self._set_or_increment(cleared, points[0].value)
                self._published[key] = 0.0, [cleared]

    def _set_or_increment(self, point: Point, before: float) -> None:
        is_counter = point.metric.kind is Kind.COUNTER
        if point.name not in self._instruments:
            kind = self._api.Counter if is_counter else self._api.Gauge
            self._instruments[point.name] = kind(point.name, point.metric.description, point.label_names)
        instrument, labels = self._instruments[point.name], dict(zip(point.label_names, point.labels, strict=True))
        if not is_counter:
            instrument.set(point.value, labels)
        elif increment := point.value - before if point.value > before else point.value:  # less: counting began anew
            instrument.inc(increment, labels)
