"""What a replica counts, as metrics of Ray, which every node exports to Prometheus."""

import time
from collections.abc import Iterator, Mapping, Sequence

from ray.serve import metrics as serve_metrics
from ray.serve._private.constants import REQUEST_LATENCY_BUCKETS_MS  # all who tell a histogram have the same bounds
from ray.util import metrics as ray_metrics

from app.serving.endpoint import Endpoint
from app.serving.metrics import endpoint_values
from app.serving.protocol.openai.errors import OVERLOAD_STATUS
from app.telemetry.catalog import REQUEST_SECONDS, REQUESTS
from app.telemetry.metrics import INTERVAL_S, Distribution, Kind, Metric, Publisher, Sample

_MAX_OBSERVED = 250
"""Latencies that Serve's histograms are told of a model in a report. Each takes a few µs here and in Ray's agent."""
_METHODS = {"http": "POST", "openai": "POST", "grpc": "/inference.GRPCInferenceService/ModelInfer"}
_HTTP_STATUS = {
    "ok": "200", "invalid": "400", "unauthorized": "401", "not_served": "404", "cancelled": "499", "overload": "503",
    "engine": "503", "deadline": "504", "error": "500",
}  # fmt: skip
_STATUS = {
    "http": _HTTP_STATUS,
    "openai": _HTTP_STATUS | {"overload": str(OVERLOAD_STATUS)},
    "grpc": {"ok": "OK", "invalid": "INVALID_ARGUMENT", "unauthorized": "UNAUTHENTICATED", "not_served": "NOT_FOUND",
             "cancelled": "CANCELLED", "overload": "UNAVAILABLE", "engine": "UNAVAILABLE",
             "deadline": "DEADLINE_EXCEEDED", "error": "INTERNAL"},
}  # fmt: skip
_DEPLOYMENT_REQUESTS = Metric(
    "serve_deployment_request_counter", Kind.COUNTER, "The number of queries that have been processed.", ("route",)
)
_DEPLOYMENT_ERRORS = Metric(
    "serve_deployment_error_counter",
    Kind.COUNTER,
    "The number of exceptions that have occurred.",
    ("route", "exception_type"),
)
_REQUEST_LABELS = ("route", "method", "application", "status_code")
_ERROR_LABELS = ("route", "error_code", "method", "application")


class ReplicaMetrics:
    """Rayloom's own metrics of a replica, and Serve's for the requests that Serve does not see."""

    def __init__(self, endpoint: Endpoint, application: str) -> None:
        self._endpoint = endpoint
        self._application = application
        self._own = Publisher(serve_metrics)  # adds which replica it is
        self._ingress = Publisher(ray_metrics)
        self._latencies = _ServeLatencies(application)
        self._reported_s = -INTERVAL_S

    def report(self) -> None:
        """Report all values to Ray, unless they were just reported."""
        if time.monotonic() - self._reported_s < INTERVAL_S:
            return
        self._reported_s = time.monotonic()
        values = list(endpoint_values(self._endpoint))
        requests = [value for value in values if isinstance(value, Sample) and self._is_hidden(value)]
        self._own.publish([*values, *_summed(_deployment_samples(requests))])
        self._ingress.publish(_summed(ingress_samples(requests, self._application)))
        for value in values:
            if isinstance(value, Distribution) and value.metric is REQUEST_SECONDS:
                self._latencies.observe(value)

    def _is_hidden(self, sample: Sample) -> bool:
        """Return whether a sample counts requests that Serve does not see. Of a gRPC stream it sees one request.

        Of OpenAI's requests, it sees those for vectors, which are not for language models.
        """
        if sample.metric is not REQUESTS:
            return False
        model, _, protocol, _ = sample.labels
        return protocol in ("http", "grpc") or (protocol == "openai" and model in self._endpoint.generators)


def _route(model: str, protocol: str = "http") -> str:
    if protocol == "openai":
        return "/v1"
    return f"/v2/models/{model}/infer" if model else "/"


def _deployment_samples(requests: Sequence[Sample]) -> Iterator[Sample]:
    """Yield what Serve counts of a deployment."""
    for sample in requests:
        model, _, protocol, outcome = sample.labels
        yield _DEPLOYMENT_REQUESTS.of(sample.value, _route(model, protocol))
        if outcome in ("overload", "deadline", "engine", "error"):
            yield _DEPLOYMENT_ERRORS.of(sample.value, _route(model, protocol), outcome)


def ingress_samples(requests: Sequence[Sample], application: str) -> Iterator[Sample]:
    """Yield what Serve's proxies count of requests over HTTP and gRPC."""
    for sample in requests:
        model, _, protocol, outcome = sample.labels
        kind = "grpc" if protocol == "grpc" else "http"
        status, method, route = _STATUS[protocol][outcome], _METHODS[protocol], _route(model, protocol)
        counted = Metric(f"serve_num_{kind}_requests", Kind.COUNTER, f"The number of {kind} requests.", _REQUEST_LABELS)
        yield counted.of(sample.value, route, method, application, status)
        if outcome != "ok":
            errors = Metric(
                f"serve_num_{kind}_error_requests",
                Kind.COUNTER,
                f"The number of errored {kind} requests.",
                _ERROR_LABELS,
            )
            yield errors.of(sample.value, route, status, method, application)


def _summed(samples: Iterator[Sample]) -> list[Sample]:
    """Add up the samples of the same labels, which the versions of a model are."""
    sums: dict[tuple[Metric, tuple[str, ...]], float] = {}
    for sample in samples:
        key = sample.metric, sample.labels
        sums[key] = sums.get(key, 0.0) + sample.value
    return [Sample(metric, labels, value) for (metric, labels), value in sums.items()]


class _ServeLatencies:
    """Serve's histograms of latencies, told of a share of the requests: Ray has none that takes counts."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._told: dict[tuple[str, ...], list[int]] = {}
        bounds = REQUEST_LATENCY_BUCKETS_MS
        self._deployment = serve_metrics.Histogram(
            "serve_deployment_processing_latency_ms", "The latency for queries to be processed.", bounds, ("route",)
        )
        self._ingress = ray_metrics.Histogram(
            "serve_http_request_latency_ms", "The latency of requests.", bounds, _REQUEST_LABELS
        )

    def observe(self, latencies: Distribution) -> None:
        """Observe up to ``_MAX_OBSERVED`` of the latencies since the last report, each bucket in proportion."""
        told = self._told.get(latencies.labels, [0] * len(latencies.counts))
        new = [max(0, count - before) for count, before in zip(latencies.counts, told, strict=True)]
        self._told[latencies.labels] = list(latencies.counts)
        share = min(1.0, _MAX_OBSERVED / max(sum(new), 1))
        for index, count in enumerate(new):
            self._observe(latencies.labels[0], 1e3 * _middle(latencies.bounds, index), round(count * share))

    def _observe(self, model: str, latency_ms: float, times: int) -> None:
        deployment: Mapping[str, str] = {"route": _route(model)}
        ingress = dict(zip(_REQUEST_LABELS, (_route(model), "POST", self._application, "200"), strict=True))
        for _ in range(times):
            self._deployment.observe(latency_ms, deployment)
            self._ingress.observe(latency_ms, ingress)


def _middle(bounds: Sequence[float], index: int) -> float:
    lower = bounds[index - 1] if index else 0.0
    return (lower + bounds[index]) / 2 if index < len(bounds) else 2 * lower
