"""An error over HTTP, by whichever part of the endpoint it is told."""

from collections.abc import Mapping

from starlette.responses import JSONResponse

from app.serving.protocol.bodies import ErrorBody


class ErrorResponse(JSONResponse):
    """``{"error": message}``."""

    def __init__(self, message: str, status: int, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(ErrorBody(error=message).model_dump(), status, headers)


def no_replica_answers() -> ErrorResponse:
    """To be told in place of a replica: it died with the request, or none is known."""
    return ErrorResponse("no replica could answer: try again", 503, {"retry-after": "1"})
