"""Spans of traced requests: their time in the queue, and the calls of the engine that they share."""

import time
from collections.abc import Mapping, Sequence
from functools import partial

from app.serving.batching.groups import QueuedRequest
from app.serving.batching.release import RequestBatch
from app.serving.batching.statistics import ReleaseReason
from app.serving.batching.threads import CallResult
from app.telemetry.tracing import RequestTrace
from app.warnings import BestEffort


class BatchSpans:
    """Makes the spans of a batcher. If that fails, its requests are answered all the same."""

    def __init__(self, attributes: Mapping[str, str]) -> None:
        """``attributes`` of each batch name the model."""
        self._attributes = attributes
        self._try = BestEffort("spans cannot be made", "serving")
        self.traced = 0
        """Traced requests that are not answered yet."""

    def called(self, batch: RequestBatch, outcome: CallResult) -> None:
        """Make the spans of a call that has ended, if a traced request is in it."""
        traces = [part.request.trace for part in batch.parts if part.request.trace]
        if not traces:
            return
        for part in batch.parts:
            # A retry's requests got the span of their queue with the failed call.
            if part.request.trace and part.start == 0 and batch.reason is not ReleaseReason.RETRY:
                self._try(partial(_record_queue, part.request, part.request.queue_s))
        self._try(partial(self._record_call, batch, outcome, traces))

    def refused(self, request: QueuedRequest) -> None:
        """Make the span of a request that was refused late, if it is traced and no call has begun for it."""
        if request.trace and not request.queue_s:
            self._try(partial(_record_queue, request, time.monotonic() - request.arrived_s))

    def _record_call(self, batch: RequestBatch, outcome: CallResult, traces: Sequence[RequestTrace]) -> None:
        """Make a span of the batch with links to all requests, and one of the engine in it.

        The batch belongs to the trace of its first traced request.
        """
        # Imported here, because opentelemetry is in the optional extra ``tracing``.
        from opentelemetry.trace import Link, StatusCode, set_span_in_context

        # A call has one point in time, its end, and three durations. Work back from the end.
        inferred_s = outcome.ended_s - outcome.time.output_s
        engine_s = inferred_s - outcome.time.infer_s
        tracer = traces[0].tracer
        span = tracer.start_span(
            "batch",
            set_span_in_context(traces[0].span),
            attributes={**self._attributes, "rows": batch.rows, "reason": batch.reason},
            links=[Link(trace.span.get_span_context()) for trace in traces],
            start_time=_moment_ns(engine_s - outcome.time.input_s),
        )
        engine = tracer.start_span("engine", set_span_in_context(span), start_time=_moment_ns(engine_s))
        if isinstance(outcome.answer, Exception):
            engine.set_status(StatusCode.ERROR, str(outcome.answer))
        engine.end(_moment_ns(inferred_s))
        span.end()


def _record_queue(request: QueuedRequest, waited_s: float) -> None:
    """Make the span of a request's time in the queue."""
    from opentelemetry.trace import set_span_in_context

    assert request.trace is not None
    arrived_ns = _moment_ns(request.arrived_s)
    span = request.trace.tracer.start_span("queue", set_span_in_context(request.trace.span), start_time=arrived_ns)
    span.end(arrived_ns + round(waited_s * 1e9))


def _moment_ns(monotonic_s: float) -> int:
    """Return a time of the clock ``time.monotonic``, which the batcher has, as nanoseconds since 1970."""
    return time.time_ns() - round((time.monotonic() - monotonic_s) * 1e9)
