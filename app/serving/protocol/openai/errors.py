"""OpenAI's error object, by which its clients tell errors apart.

Clients raise by the status: 400 ``BadRequestError``, 401 ``AuthenticationError``, 404 ``NotFoundError``, 429
``RateLimitError``, and from 500 on ``InternalServerError``. They try again after 408, 409, 429 and from 500 on. They
wait for ``Retry-After`` if it is at most two minutes.
"""

import re
from typing import Self

from pydantic import BaseModel

from app.errors import NotServedError, OverloadError, RayloomError, UnauthorizedError

OVERLOAD_STATUS = 429
"""The status of OverloadError, for which clients raise ``RateLimitError``. Elsewhere it is 503."""
_OUR_PATHS = re.compile("/v1/predict|/v1/models/[^/]+(?:/versions/[^/]+)?/predict")
_CODES = {
    "key.unknown": "unknown_parameter",
    "key.missing": "missing_required_parameter",
    "key.type": "invalid_value",
    "parameter.unsupported": "unsupported_value",
    "prompt.too_long": "context_length_exceeded",
}
"""OpenAI's codes by the rule that a request breaks."""
_CODES_BY_CLASS: dict[type[Exception], str] = {
    UnauthorizedError: "invalid_api_key",
    NotServedError: "model_not_found",
    OverloadError: "rate_limit_exceeded",
}


def speaks_openai(path: str) -> bool:
    """Return whether a path is OpenAI's, known or not. ``predict`` is under ``/v1``, too, and has its own form."""
    return path.startswith("/v1/") and not _OUR_PATHS.fullmatch(path)


class ErrorObject(BaseModel):
    """An error, in words and for programs."""

    message: str
    type: str
    param: str | None = None
    """The field that is wrong."""
    code: str | None = None

    @classmethod
    def of(cls, error: Exception | None, status: int, message: str) -> Self:
        """Describe an error that is answered with this status and message."""
        code = next((code for kind, code in _CODES_BY_CLASS.items() if isinstance(error, kind)), None)
        param = "model" if isinstance(error, NotServedError) else None
        if isinstance(error, RayloomError):
            code, param = code or _CODES.get(error.rule), param or error.key
        return cls(message=message, type=_type_of(status), param=param, code=code)


class ErrorBody(BaseModel):
    """The body of an error, and the event of one within a stream."""

    error: ErrorObject


def _type_of(status: int) -> str:
    if status == OVERLOAD_STATUS:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
