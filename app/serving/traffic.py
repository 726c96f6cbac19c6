"""What came to an endpoint, and how it ended, by model, version and protocol."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from app.errors import (
    DataError,
    DeadlineError,
    DisconnectedError,
    EngineError,
    NotServedError,
    OverloadError,
    RequestError,
    UnauthorizedError,
)
from app.telemetry.catalog import RECEIVED_BYTES, REQUESTS, SENT_BYTES
from app.telemetry.metrics import Sample
from app.telemetry.tracing import RequestTracer

Protocol = Literal["http", "grpc", "natural", "openai"]
"""How a request came: by the Open Inference Protocol over HTTP or gRPC, as natural input, or by OpenAI's API."""
Outcome = Literal[
    "ok", "invalid", "unauthorized", "not_served", "overload", "deadline", "cancelled", "engine", "error"
]  # fmt: skip
"""How a request ended. Plain strings: an enum's hash takes longer than all else that is counted of a request."""

_OUTCOMES: dict[type[BaseException], Outcome] = {
    DisconnectedError: "cancelled",
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
    # The first match counts, so a subclass stands before its base class.
    return next((outcome for kind, outcome in _OUTCOMES.items() if isinstance(error, kind)), "error")


@dataclass(slots=True)
class _Tally:
    outcomes: defaultdict[Outcome, int] = field(default_factory=lambda: defaultdict(int))
    received: int = 0
    sent: int = 0


class Traffic:
    """Counts every request once. Requests for what is not served have no model: their names are the clients'."""

    def __init__(self, tracer: RequestTracer | None = None) -> None:
        self.tracer = tracer
        """None: no request is traced."""
        self._tallies: dict[tuple[str, str, Protocol], _Tally] = {}
        self._taken = 0

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

    def take_new(self) -> int:
        """Return the number of requests for served models that have ended since the last call."""
        ended = sum(sum(tally.outcomes.values()) for (model, *_), tally in self._tallies.items() if model)
        new, self._taken = ended - self._taken, ended
        return new

    def samples(self) -> Iterator[Sample]:
        """Yield what was counted."""
        for (model, version, protocol), tally in self._tallies.items():
            yield RECEIVED_BYTES.of(tally.received, model, version, protocol)
            yield SENT_BYTES.of(tally.sent, model, version, protocol)
            for outcome, count in tally.outcomes.items():
                yield REQUESTS.of(count, model, version, protocol, outcome)
