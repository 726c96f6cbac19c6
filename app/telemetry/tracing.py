"""Traces by OpenTelemetry, in processes whose environment names a collector.

``OTEL_EXPORTER_OTLP_ENDPOINT`` switches it on. Off, nothing of OpenTelemetry is imported. Its global provider is left
alone, since Ray uses that for spans of its own.
"""

import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol, TypeVar

from app.warnings import warn

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

Argument = TypeVar("Argument")
Result = TypeVar("Result")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
RATIO = "OTEL_TRACES_SAMPLER_ARG"
_DEFAULT_RATIO = 0.01
PARENT = "TRACEPARENT"
"""In a job's environment: the span that it is a part of."""
_FLUSH_TIMEOUT_MS = 3000
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_SAMPLED = 1
"""The flag of a ``traceparent`` whose sender records the trace: https://www.w3.org/TR/trace-context/"""


@cache
def find_tracer() -> "Tracer | None":
    """Return what makes the spans of this process; None if tracing is off."""
    provider = _provider()
    return provider.get_tracer("rayloom") if provider else None


@cache
def _provider() -> "TracerProvider | None":
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON
    except ImportError as error:
        warn(f"{ENDPOINTS[1]} is set, but there are no traces ({error}): install rayloom[tracing]")
        return None
    # Each try that fails would be a line.
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    service = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "rayloom")}
    # ``RequestTracer`` chooses the requests, so every span that is made is also sent.
    provider = TracerProvider(sampler=ALWAYS_ON, resource=Resource.create(service))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


@contextmanager
def stage(name: str, parent: str | None = None, **attributes: str) -> Iterator[None]:
    """Make a span of a job's stage, within that of the stage around it. An error is noted on it.

    ``parent`` is a ``traceparent``, for a stage in another process than the one around it.
    """
    tracer = find_tracer()
    if tracer is None:
        yield
        return
    from opentelemetry import trace

    is_within = trace.get_current_span().get_span_context().is_valid
    context = None if is_within else _context_of(parent or os.environ.get(PARENT))
    with tracer.start_as_current_span(name, context, attributes=attributes):
        yield


def current_traceparent() -> str | None:
    """Return the stage under way as W3C's ``traceparent``, for another process; None without one."""
    if find_tracer() is None:
        return None
    from opentelemetry import trace

    return _traceparent(trace.get_current_span())


def call_within(parent: str | None, name: str, work: Callable[[Argument], Result], argument: Argument) -> Result:
    """Call ``work`` as a stage. Its process may be another one, so its spans are sent before this returns."""
    with stage(name, parent):
        result = work(argument)
    flush()
    return result


def flush() -> None:
    """Send the spans that have ended, for at most ``_FLUSH_TIMEOUT_MS``."""
    if (provider := _provider()) is not None:
        provider.force_flush(_FLUSH_TIMEOUT_MS)


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The span of a request under way."""

    span: "Span"
    tracer: "Tracer"

    @property
    def traceparent(self) -> str | None:
        """The span as W3C's header."""
        return _traceparent(self.span)

    def note_error(self, error: Exception) -> None:
        """Note why the request is not answered."""
        self.span.record_exception(error)

    def end(self, model: str, version: str, outcome: str) -> None:
        """End the span, with what is known of the request by then."""
        from opentelemetry.trace import StatusCode

        self.span.set_attributes({"model": model, "version": version, "outcome": outcome})
        if outcome != "ok":
            self.span.set_status(StatusCode.ERROR, outcome)
        self.span.end()


_current: ContextVar[RequestTrace | None] = ContextVar("request_trace", default=None)
current_request: Callable[[], RequestTrace | None] = _current.get
"""Returns the request that the running task answers, if it is traced."""


class RequestTracer:
    """Chooses which requests of a replica are traced, and makes their spans.

    A request is traced if its client traces it, which ``traceparent`` says. Of requests that say nothing a share is.
    """

    def __init__(self, tracer: "Tracer", ratio: float, random_number: Callable[[], float] = random.random) -> None:
        """``ratio`` is the share of requests, and ``random_number`` returns one from 0 to 1."""
        self._tracer, self._ratio, self._random = tracer, ratio, random_number

    def begin(self, protocol: str, traceparent: str | None) -> RequestTrace | None:
        """Begin the span of a request, which ``RequestTrace.end`` ends. Return None if it is not to be traced."""
        decided = _decision(traceparent)
        if not (self._random() < self._ratio if decided is None else decided):
            return None
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        within = _context_of(traceparent) or Context()
        attributes = {"rpc.system": protocol}
        return RequestTrace(self._tracer.start_span("request", within, SpanKind.SERVER, attributes), self._tracer)


@contextmanager
def within_request(trace: RequestTrace | None) -> Iterator[None]:
    """Let ``current_request`` return the request within the block."""
    token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(token)


def find_request_tracer() -> RequestTracer | None:
    """Return the tracer of a replica's requests; None if tracing is off."""
    tracer = find_tracer()
    return RequestTracer(tracer, float(os.environ.get(RATIO, _DEFAULT_RATIO))) if tracer else None


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A traced request in a call of the engine."""

    trace: RequestTrace
    arrived_s: float
    """On the clock ``time.monotonic``."""
    queue_s: float
    """Seconds from then to its first call."""


class Taken(Protocol):
    """How long the parts of a call took, in seconds."""

    input_s: float
    infer_s: float
    output_s: float


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A call of the engine with traced requests in it, which has just ended."""

    requests: Sequence[TracedRequest]
    rows: int
    reason: str
    time: Taken
    error: Exception | None

    def record(self, now_s: float) -> None:
        """Make the spans: the queue of each request, the batch with links to all of them, and the engine in it.

        The batch belongs to the trace of its first traced request. ``now_s`` is of the clock ``time.monotonic``.
        """
        from opentelemetry.trace import Link, StatusCode, set_span_in_context

        # Spans have times since 1970, and the batcher has a monotonic clock.
        epoch_ns = time.time_ns() - round(now_s * 1e9)

        def moment(seconds: float) -> int:
            return epoch_ns + round(seconds * 1e9)

        for request in self.requests:
            within, arrived_s = set_span_in_context(request.trace.span), request.arrived_s
            waited = request.trace.tracer.start_span("queue", within, start_time=moment(arrived_s))
            waited.end(moment(arrived_s + request.queue_s))
        first = self.requests[0].trace
        engine_s = now_s - self.time.output_s - self.time.infer_s
        batch = first.tracer.start_span(
            "batch",
            set_span_in_context(first.span),
            attributes={"rows": self.rows, "reason": self.reason},
            links=[Link(request.trace.span.get_span_context()) for request in self.requests],
            start_time=moment(engine_s - self.time.input_s),
        )
        engine = first.tracer.start_span("engine", set_span_in_context(batch), start_time=moment(engine_s))
        if self.error is not None:
            engine.set_status(StatusCode.ERROR, str(self.error))
        engine.end(moment(engine_s + self.time.infer_s))
        batch.end(moment(now_s))


def _decision(traceparent: str | None) -> bool | None:
    """Return whether the sender of a request records its trace; None if it does not say."""
    if traceparent is None or not _TRACEPARENT.fullmatch(traceparent):
        return None
    return bool(int(traceparent[-2:], 16) & _SAMPLED)


def _context_of(traceparent: str | None) -> "Context | None":
    """Return the context of a span elsewhere; None without one, or if it cannot be read."""
    if traceparent is None or _decision(traceparent) is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent})


def _traceparent(span: "Span") -> str | None:
    context = span.get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
