"""The counters of a replica's batchers, as Ray metrics. Every node exports these to Prometheus."""

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar
from weakref import WeakKeyDictionary

from ray.serve import metrics

from app.serving.batching.statistics import BatchingStatistics
from app.serving.endpoint import Endpoint
from app.serving.model.served import ServedModel

_VERSION = ("model", "version")

Reason = TypeVar("Reason", bound=StrEnum)


class BatchingMetrics:
    """The metrics of all versions of an endpoint. Serve adds the replica's name, so create this in the replica."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._batches = metrics.Counter(
            "rayloom_batches", "Calls of an engine, by why they were made when they were.", (*_VERSION, "reason")
        )
        self._failures = metrics.Counter(
            "rayloom_failures", "Requests that got no answer, by why.", (*_VERSION, "reason")
        )
        self._waiting = metrics.Gauge("rayloom_waiting", "Requests that an engine has not begun with.", _VERSION)
        self._waited: set[tuple[str, str]] = set()
        self._reported: WeakKeyDictionary[ServedModel, BatchingStatistics] = WeakKeyDictionary()

    def report(self) -> None:
        """Report the counts since the last report, and the number of waiting requests."""
        waiting = dict.fromkeys(self._waited, 0)  # versions that are no longer served report 0
        for name, served in self._endpoint.counted:
            waiting[name, served.version] = served.waiting
            tags = dict(zip(_VERSION, (name, served.version), strict=True))
            counted, reported = served.batching, self._reported.setdefault(served, BatchingStatistics())
            _add(self._batches, tags, counted.releases, reported.releases)
            _add(self._failures, tags, counted.failures, reported.failures)
        for version, requests in waiting.items():
            self._waiting.set(requests, dict(zip(_VERSION, version, strict=True)))
        self._waited = set(waiting)


def _add(
    counter: metrics.Counter, tags: Mapping[str, str], counted: Counter[Reason], reported: Counter[Reason]
) -> None:
    """Add the counts that were not reported yet, and mark them as reported."""
    for reason, more in (counted - reported).items():
        counter.inc(more, {**tags, "reason": reason.value})
    reported |= counted
