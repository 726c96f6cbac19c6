"""Inference from a replica's socket to its endpoint, without Serve's own work on each request.

That work is two tasks, a queue, identifiers, a log record and metrics, much beside a small request. What it is for is
held without it. The endpoint itself drops requests whose clients have gone, and counts what it did; how many requests
are here at a time, and how large they are together, is bounded here. A replica that stops waits for every connection of
its HTTP server, whoever answers on it: Serve closes the listener, and then waits for uvicorn, within the same time that
it gives to the requests it sees.
"""

from starlette.types import Receive, Scope, Send

from app.errors import OverloadError
from app.serving.endpoint import Endpoint
from app.serving.http import HttpApi, asks_inference, refused
from app.serving.protocol.limits import LIMITS

_RETRY_AFTER_S = 1.0
_MOST_BYTES = 2 * 2**30
"""Of the bodies that are here, decompressed."""
_MOST_INFLATED = 1032
"""Times that deflate, and so gzip, makes a body larger at most: https://zlib.net/zlib_tech.html"""


class DirectInference:
    """The requests for inference over HTTP that Serve does not see."""

    def __init__(self, endpoint: Endpoint, api: HttpApi) -> None:
        """Let ``api`` answer for ``endpoint``."""
        self.ongoing = 0
        """Requests that are here: being read, waiting or running."""
        self._bytes = 0  # that their bodies may come to
        self._endpoint = endpoint
        self._api = api

    def takes(self, scope: Scope) -> bool:
        """Whether a request is one of them."""
        return asks_inference(scope)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it at once if there are too many, or too large ones."""
        size = _largest(scope)
        if self.ongoing >= self._endpoint.config.most_requests or self._bytes + size > _MOST_BYTES:
            error = OverloadError(
                f"{self.ongoing} requests of up to {self._bytes} bytes are here already: try again later",
                _RETRY_AFTER_S,
            )
            await refused(error)(scope, receive, send)
            return
        self.ongoing += 1
        self._bytes += size
        try:
            await self._api(scope, receive, send)
        finally:
            self.ongoing -= 1
            self._bytes -= size


def _largest(scope: Scope) -> int:
    """How many bytes a request's body may come to, decompressed, before it is refused as too large."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"")
    if not length.isdigit():  # it comes in chunks
        return LIMITS.body_bytes
    return min(int(length[:18]) * (_MOST_INFLATED if b"content-encoding" in headers else 1), LIMITS.body_bytes)
