"""The endpoint's error responses, over HTTP and gRPC."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from grpc import StatusCode
from pydantic import BaseModel
from starlette.responses import JSONResponse

from app.errors import (
    DataError,
    DeadlineError,
    DisconnectedError,
    EngineError,
    ModelLoadError,
    NotServedError,
    OverloadError,
    RayloomError,
    RequestError,
    RequestTooLargeError,
    UnauthorizedError,
    UnsupportedError,
)
from app.serving.protocol.openai.errors import OVERLOAD_STATUS, ErrorObject, speaks_openai
from app.serving.protocol.openai.errors import ErrorBody as OpenAIErrorBody

LOG = logging.getLogger(__name__)


class ErrorBody(BaseModel):
    """The body of an error, except where OpenAI defines it."""

    error: str


class ErrorResponse(JSONResponse):
    """An error over HTTP: ``{"error": message}``, and on OpenAI's paths its object in place of the message."""

    def __init__(
        self,
        message: str,
        status: int,
        headers: Mapping[str, str] | None = None,
        path: str = "",
        error: Exception | None = None,
    ) -> None:
        """Answer a request for ``path`` with a message, and with what programs need to know of ``error``."""
        body: BaseModel = ErrorBody(error=message)
        if speaks_openai(path):
            body = OpenAIErrorBody(error=ErrorObject.of(error, status, message))
        super().__init__(body.model_dump(), status, headers)


def no_replica_answers(path: str = "") -> ErrorResponse:
    """Return the response for a request whose replica died, or for which no replica is known."""
    return ErrorResponse("no replica could answer: try again", 503, {"retry-after": "1"}, path)


def sent_too_slowly() -> ErrorResponse:
    """Return the response for a request that has not come to its end in time."""
    return ErrorResponse("the request did not come in time: send it faster", 408)


@dataclass(frozen=True)
class Refusal:
    """The reply to a client, over HTTP and gRPC."""

    http: int
    grpc: StatusCode
    message: str
    retry_after_s: int | None = None
    """Time after which the client may try again, if known."""

    @property
    def trailers(self) -> list[tuple[str, str]]:
        """Metadata that gRPC sends beside the status and the message."""
        return [] if self.retry_after_s is None else [("retry-after", str(self.retry_after_s))]


class PassedRefusalError(RayloomError):
    """Another pool has refused a gRPC call. Its reply is passed back unchanged."""

    def __init__(self, reply: Refusal) -> None:
        super().__init__(reply.message)
        self.reply = reply


# The first match counts, so a subclass stands before its base class.
_STATUS: dict[type[Exception], tuple[int, StatusCode]] = {
    RequestTooLargeError: (413, StatusCode.RESOURCE_EXHAUSTED),
    UnsupportedError: (400, StatusCode.UNIMPLEMENTED),
    DisconnectedError: (400, StatusCode.CANCELLED),
    RequestError: (400, StatusCode.INVALID_ARGUMENT),
    DataError: (400, StatusCode.INVALID_ARGUMENT),
    UnauthorizedError: (401, StatusCode.UNAUTHENTICATED),
    NotServedError: (404, StatusCode.NOT_FOUND),
    OverloadError: (503, StatusCode.UNAVAILABLE),
    DeadlineError: (504, StatusCode.DEADLINE_EXCEEDED),
    TimeoutError: (408, StatusCode.DEADLINE_EXCEEDED),
}


def refusal(error: Exception) -> Refusal:
    """Return the reply for an error. Unexpected errors are logged, and their details are not sent.

    A failed engine is logged, too. Its replica is about to be replaced, and another one may answer meanwhile.
    """
    if isinstance(error, PassedRefusalError):
        return error.reply
    if isinstance(error, EngineError):
        LOG.error("an engine failed", exc_info=error)
        message = str(error) if isinstance(error, ModelLoadError) else "the engine failed: try again"
        return Refusal(503, StatusCode.UNAVAILABLE, message)
    for kind, (http, grpc) in _STATUS.items():
        if isinstance(error, kind):
            # The header has whole seconds.
            after_s = math.ceil(error.retry_after_s) if isinstance(error, OverloadError) else None
            return Refusal(http, grpc, str(error), after_s)
    LOG.error("a request failed", exc_info=error)
    return Refusal(500, StatusCode.INTERNAL, "internal error: see the replica's log in the Ray dashboard")


def openai_error(error: Exception) -> OpenAIErrorBody:
    """Return an error as OpenAI's object."""
    reply = refusal(error)
    return OpenAIErrorBody(error=ErrorObject.of(error, _openai_status(error, reply), reply.message))


def error_response(error: Exception, traceparent: str | None = None, path: str = "") -> ErrorResponse:
    """Return the HTTP response for an error.

    Args:
        traceparent: the span of the request, if it is traced.
        path: that of the request, which decides the form of the error.
    """
    reply = refusal(error)
    status = _openai_status(error, reply) if speaks_openai(path) else reply.http
    headers = {"traceparent": traceparent} if traceparent else {}
    if reply.retry_after_s is not None:
        headers["retry-after"] = str(reply.retry_after_s)
    if isinstance(error, UnauthorizedError):
        # HTTP wants it with every 401.
        headers["www-authenticate"] = "Bearer"
    return ErrorResponse(reply.message, status, headers, path, error)


def _openai_status(error: Exception, reply: Refusal) -> int:
    return OVERLOAD_STATUS if isinstance(error, OverloadError) else reply.http
