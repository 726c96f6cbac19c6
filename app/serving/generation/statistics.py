"""The statistics of a served language model: the times of its requests, their tokens, and their ends."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from app.best_effort import BestEffort
from app.engines.generation.base import FinishReason, RefusedError
from app.serving.batching.statistics import Buckets, Durations, FailureReason, RecentLatencies
from app.serving.traffic import Outcome, outcome_of
from app.telemetry.tracing import RequestTrace, current_request

_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 20.0,
    30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
"""Upper bounds of buckets in seconds, from the time between two tokens to the time of a long answer."""

_REASONS: dict[Outcome, FailureReason] = {
    "overload": FailureReason.REJECTED,
    "deadline": FailureReason.DEADLINE,
    "cancelled": FailureReason.CANCELLED,
    "engine": FailureReason.ENGINE,
}


def _buckets() -> Buckets:
    return Buckets(_BOUNDS_S)


@dataclass
class StreamStatistics:
    """Sums since the version was loaded. A request with several answers counts once, and each answer has an end."""

    success: Durations = field(default_factory=Durations)
    """Requests whose answers are complete: from arrival to the last token."""
    fail: Durations = field(default_factory=Durations)
    queue: Durations = field(default_factory=Durations)
    """The part of ``success`` before the engine had the prompt."""
    prefill: Durations = field(default_factory=Durations)
    """The part of ``success`` from there to the first token."""
    decode: Durations = field(default_factory=Durations)
    """The part of ``success`` from the first token to the last."""
    failures: Counter[FailureReason] = field(default_factory=Counter)
    invalid: int = 0
    """Requests that were refused because the model cannot answer them. They are not failures."""
    finishes: Counter[FinishReason] = field(default_factory=Counter)
    """Complete answers, by their end."""
    prompt_tokens: int = 0
    """Tokens of the prompts that the engine has received."""
    generated_tokens: int = 0
    """Tokens of all answers, complete or not."""
    request_s: Buckets = field(default_factory=_buckets)
    """From arrival to the last token, of complete answers."""
    queue_s: Buckets = field(default_factory=_buckets)
    first_token_s: Buckets = field(default_factory=_buckets)
    """From arrival to the first token."""
    between_tokens_s: Buckets = field(default_factory=_buckets)
    """Between two tokens of an answer."""
    latencies: RecentLatencies = field(default_factory=RecentLatencies)
    """Recent times to the first token. They scale replicas, because a client chooses how long its answer takes."""
    last_answer_ms: int = 0
    """When the last request was answered, in milliseconds since 1970; 0 before it."""


class RequestTimer:
    """The times of one request. At its end, they go to the model's statistics and to the request's trace.

    Call ``started`` when the engine gets the prompt, ``received`` for the tokens of each answer, and at the end
    ``answered`` or ``failed``. Only the first end counts.
    """

    def __init__(self, statistics: StreamStatistics, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with the request's arrival. It belongs to the trace of the running task."""
        self._statistics, self._clock = statistics, clock
        self._trace = current_request()
        self._arrived_s = clock()
        self._started_s: float | None = None
        self._first_s: float | None = None
        self._last_s: dict[int, float] = {}
        """The time of each answer's last token."""
        self._has_ended = False

    def started(self, prompt_tokens: int) -> None:
        """Count the prompt, which has left the queue."""
        self._started_s = self._clock()
        self._statistics.prompt_tokens += prompt_tokens
        self._statistics.queue_s.add(self._started_s - self._arrived_s)

    def received(self, index: int, tokens: int) -> None:
        """Count tokens of an answer that came together."""
        if not tokens:
            return
        now_s, counted = self._clock(), self._statistics
        counted.generated_tokens += tokens
        if self._first_s is None:
            self._first_s = now_s
            counted.first_token_s.add(now_s - self._arrived_s)
            counted.latencies.add(now_s - self._arrived_s)
        # Tokens that come together count as if they had come one by one since the previous ones.
        if (last_s := self._last_s.get(index)) is not None:
            for _ in range(tokens):
                counted.between_tokens_s.add((now_s - last_s) / tokens)
        self._last_s[index] = now_s

    def finished(self, reason: FinishReason) -> None:
        """Count the end of one answer."""
        self._statistics.finishes[reason] += 1

    def answered(self) -> None:
        """Count the request as answered."""
        if self._has_ended:
            return
        now_s, counted = self._end(), self._statistics
        started_s = self._arrived_s if self._started_s is None else self._started_s
        first_s = now_s if self._first_s is None else self._first_s
        counted.last_answer_ms = round(time.time() * 1e3)
        counted.success.add(now_s - self._arrived_s)
        counted.queue.add(started_s - self._arrived_s)
        counted.prefill.add(first_s - started_s)
        counted.decode.add(now_s - first_s)
        counted.request_s.add(now_s - self._arrived_s)

    def failed(self, error: BaseException) -> None:
        """Count the request as failed. A cancellation means that its client has gone."""
        if self._has_ended:
            return
        seconds, outcome = self._end() - self._arrived_s, outcome_of(error)
        # Closing the stream of an answer cancels it. A request that the engine refuses is the client's mistake.
        if isinstance(error, GeneratorExit):
            outcome = "cancelled"
        if outcome == "invalid" or isinstance(error, RefusedError):
            self._statistics.invalid += 1
            return
        # Late requests count, because an overload would look fast without its slowest requests.
        if outcome == "deadline" and self._first_s is None:
            self._statistics.latencies.add(seconds)
        self._statistics.failures[_REASONS.get(outcome, FailureReason.INTERNAL)] += 1
        self._statistics.fail.add(seconds)

    def _end(self) -> float:
        self._has_ended = True
        now_s = self._clock()
        if self._trace:
            _TRY(partial(self._record_spans, self._trace, now_s))
        return now_s

    def _record_spans(self, trace: RequestTrace, ended_s: float) -> None:
        """Record the spans of queue, prefill and decoding that the request reached."""
        # Imported here, because opentelemetry is in the optional extra ``tracing``.
        from opentelemetry.trace import set_span_in_context

        moments = [("queue", self._arrived_s), ("prefill", self._started_s), ("decode", self._first_s)]
        begun = [(name, moment_s) for name, moment_s in moments if moment_s is not None]
        offset_ns = time.time_ns() - round(self._clock() * 1e9)
        for (name, from_s), to_s in zip(begun, [*(moment for _, moment in begun[1:]), ended_s], strict=True):
            span = trace.tracer.start_span(
                name, set_span_in_context(trace.span), start_time=offset_ns + round(from_s * 1e9)
            )
            span.end(offset_ns + round(to_s * 1e9))


_TRY = BestEffort("spans cannot be made", "serving")
