"""Traces by OpenTelemetry, in processes whose environment names a collector.

``OTEL_EXPORTER_OTLP_ENDPOINT`` switches it on. Off, nothing of OpenTelemetry is imported. Its global provider is left
alone, since Ray uses that for spans of its own.
"""

import atexit
import logging
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from app.best_effort import warn

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
_FLUSH_TIMEOUT_S = 3.0
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_SAMPLED = 1
"""The flag of a ``traceparent`` whose sender records the trace: https://www.w3.org/TR/trace-context/"""


@cache
def find_tracer() -> "Tracer | None":
    """Return what makes the spans of this process; None if tracing is off."""
    sender = _sender()
    return sender.provider.get_tracer("rayloom") if sender else None


class _Sender:
    """Sends spans on request, too, in a thread: the provider's own call heeds no timeout.

    The thread is started before it is needed, because none can be started while Python exits.
    """

    def __init__(self, provider: "TracerProvider") -> None:
        self.provider = provider
        self._requests: SimpleQueue[threading.Event] = SimpleQueue()
        threading.Thread(target=self._send, daemon=True, name="tracing").start()
        atexit.register(self.flush)

    def flush(self) -> None:
        """Send the spans that have ended, for at most ``_FLUSH_TIMEOUT_S``."""
        sent = threading.Event()
        self._requests.put(sent)
        sent.wait(_FLUSH_TIMEOUT_S)

    def _send(self) -> None:
        while True:
            sent = self._requests.get()
            self.provider.force_flush()
            sent.set()


@cache
def _sender() -> _Sender | None:
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        # Each try that fails would be a line.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        service = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "rayloom")}
        # ``RequestTracer`` chooses the requests, so every span that is made is also sent.
        provider = TracerProvider(sampler=ALWAYS_ON, resource=Resource.create(service), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    except Exception as error:  # it is not installed, or cannot read one of its variables
        reason = f"{type(error).__name__}: {error}"
        warn(f"{ENDPOINTS[1]} is set, but there are no traces ({reason}): install rayloom[tracing], and check OTEL_*")
        return None
    return _Sender(provider)


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

    # Only the outermost stage of a process has its parent elsewhere.
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
    try:
        with stage(name, parent):
            return work(argument)
    finally:
        flush()


def flush() -> None:
    """Send the spans that have ended, for at most ``_FLUSH_TIMEOUT_S``."""
    if (sender := _sender()) is not None:
        sender.flush()


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

        # Never the current context, which may hold a span of Ray's own.
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
    return RequestTracer(tracer, _ratio()) if tracer else None


def _ratio() -> float:
    """Return the share of requests to trace. The variable may have the argument of another sampler."""
    given = os.environ.get(RATIO) or str(_DEFAULT_RATIO)
    try:
        return float(given)
    except ValueError:
        warn(f"{RATIO} is {given!r}, not a number from 0 to 1: {_DEFAULT_RATIO:g} of the requests are traced")
        return _DEFAULT_RATIO


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
