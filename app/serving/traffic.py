"""What came to an endpoint, and how it ended, by model, version and protocol."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from app.errors import (
    DataError,
    DeadlineError,
    EngineError,
    NotServedError,
    OverloadError,
    RequestError,
    UnauthorizedError,
)
from app.telemetry.catalog import RECEIVED_BYTES, REQUESTS, SENT_BYTES
from app.telemetry.metrics import Sample
from app.telemetry.tracing import RequestTracer, within_request

Protocol = Literal["http", "grpc", "natural"]
"""How a request came: by the Open Inference Protocol over HTTP or gRPC, or as natural input over HTTP."""
Outcome = Literal[
    "ok", "invalid", "unauthorized", "not_served", "overload", "deadline", "cancelled", "engine", "error"
]  # fmt: skip
"""How a request ended. Plain strings: an enum's hash takes longer than all else that is counted of a request."""

_OUTCOMES: dict[type[BaseException], Outcome] = {
    RequestError: "invalid",
    DataError: "invalid",
    # The body came too slowly, which is no deadline of the server.
    TimeoutError: "invalid",
    UnauthorizedError: "unauthorized",
    NotServedError: "not_served",
    OverloadError: "overload",
    DeadlineError: "deadline",
    asyncio.CancelledError: "cancelled",
    EngineError: "engine",
}


def outcome_of(error: BaseException) -> Outcome:
    """Return how a request ended that raised an error."""
    # ``isinstance``, because some have subclasses, such as ``RequestTooLargeError``.
    return next((outcome for kind, outcome in _OUTCOMES.items() if isinstance(error, kind)), "error")


@dataclass(slots=True)
class _Tally:
    outcomes: defaultdict[Outcome, int] = field(default_factory=lambda: defaultdict(int))
    received: int = 0
    sent: int = 0


@dataclass(slots=True)
class Asked:
    """A request while it is answered: what is known of it so far."""

    model: str = ""
    version: str = ""
    outcome: Outcome = "ok"
    received: int = 0
    sent: int = 0
    traceparent: str | None = None
    """The span of the request, for its client; None if it is not traced."""


class Traffic:
    """Counts every request once. Requests for what is not served have no model: their names are the clients'."""

    def __init__(self, tracer: RequestTracer | None = None) -> None:
        self.tracer = tracer
        """None: no request is traced."""
        self._tallies: dict[tuple[str, str, Protocol], _Tally] = {}

    def add(
        self, model: str, version: str, protocol: Protocol, outcome: Outcome, received: int = 0, sent: int = 0
    ) -> None:
        """Count a request that has ended, and the bytes of its body and of the answer's."""
        tally = self._tallies.get((model, version, protocol))
        if tally is None:
            tally = self._tallies[model, version, protocol] = _Tally()
        tally.outcomes[outcome] += 1
        tally.received += received
        tally.sent += sent

    @contextmanager
    def counted(self, protocol: Protocol, traceparent: str | None = None) -> Iterator[Asked]:
        """Count the request that is answered in the block, which notes on the value what it learns of it.

        ``traceparent`` is the client's span. The request may be traced.
        """
        trace = self.tracer.begin(protocol, traceparent) if self.tracer else None
        if trace is None:
            with self._counted(protocol) as asked:
                yield asked
            return
        asked = Asked()
        try:
            with within_request(trace), self._counted(protocol) as asked:
                asked.traceparent = trace.traceparent
                yield asked
        except Exception as error:
            trace.note_error(error)
            raise
        finally:
            # The outcome is known only here, after ``_counted`` has seen the error.
            trace.end(asked.model, asked.version, asked.outcome)

    @contextmanager
    def _counted(self, protocol: Protocol) -> Iterator[Asked]:
        asked = Asked()
        try:
            yield asked
        # A client that goes away raises ``CancelledError``, which is no ``Exception``.
        except BaseException as error:
            asked.outcome = outcome_of(error)
            raise
        finally:
            self.add(asked.model, asked.version, protocol, asked.outcome, asked.received, asked.sent)

    def samples(self) -> Iterator[Sample]:
        """Yield what was counted."""
        for (model, version, protocol), tally in self._tallies.items():
            yield RECEIVED_BYTES.of(tally.received, model, version, protocol)
            yield SENT_BYTES.of(tally.sent, model, version, protocol)
            for outcome, count in tally.outcomes.items():
                yield REQUESTS.of(count, model, version, protocol, outcome)
