"""Inference from a replica's socket to its endpoint, without Serve's own work on each request.

Plain requests over HTTP take a shorter way still, ``hot``, and are counted here.

That work is two tasks, a queue, identifiers, a log record and metrics, much beside a small request. What it is for is
held without it. The endpoint itself drops requests whose clients have gone, and counts what it did; how many requests
are here at a time, and how large they are together, is bounded here. A replica that stops waits for every connection of
its HTTP server, whoever answers on it: Serve closes the listener, and then waits for uvicorn, within the same time that
it gives to the requests it sees.
"""

from starlette.types import Message, Receive, Scope, Send

from app.errors import OverloadError
from app.serving.endpoint import Endpoint
from app.serving.protocol.compression import is_compressed
from app.serving.protocol.rest import largest_body
from app.serving.transport.asgi import close_if_unread, headers_of
from app.serving.transport.http import HttpApi, asks_inference
from app.serving.transport.refusal import error_response

ROOM_BYTES = 4 * 2**30
_MOST_INFLATED = 1032
"""Times that deflate, and so gzip, makes a body larger at most: https://zlib.net/zlib_tech.html"""


class DirectInference:
    """The requests for inference over HTTP that Serve does not see."""

    def __init__(self, endpoint: Endpoint, api: HttpApi, room_bytes: int = ROOM_BYTES) -> None:
        """Let ``api`` answer for ``endpoint``.

        Args:
            room_bytes: for the bodies that are here together; one that is compressed counts as what it may come to.
        """
        self.ongoing = 0
        """Requests that are here: being read, waiting or running."""
        self._bytes = 0  # of their bodies
        self.endpoint = endpoint
        self._api = api
        self._room_bytes = room_bytes

    def takes(self, scope: Scope) -> bool:
        """Whether a request is one of them."""
        return asks_inference(scope)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it if there are too many, or once they are too large together.

        A request without its token takes no place. What is read of a body only to drop it takes no room.
        """
        receive, send = close_if_unread(scope, receive, send)
        if refusal := self._api.refusal(scope):
            await error_response(refusal)(scope, receive, send)
            return
        headers = headers_of(scope)
        largest = largest_body(headers)
        factor = _MOST_INFLATED if is_compressed(headers.get("content-encoding", "")) else 1
        held = 0

        async def counted() -> Message:
            nonlocal held
            message = await receive()
            more = min(held + factor * len(message.get("body", b"")), largest) - held
            self.hold(more)
            held += more
            return message

        try:
            self.enter()
        except OverloadError as error:
            await error_response(error)(scope, receive, send)
            return
        try:
            await self._api.infer(scope, counted, send)
        finally:
            self.leave(held)

    def enter(self, num_bytes: int = 0) -> None:
        """Count a request until it leaves, and its bytes. Raises OverloadError if there are too many."""
        if self.ongoing >= self.endpoint.config.most_requests:
            raise self._overload()
        self.hold(num_bytes)
        self.ongoing += 1

    def hold(self, num_bytes: int) -> None:
        """Count more bytes of a request that has entered. Raises OverloadError if there is no room for them."""
        if self._bytes + num_bytes > self._room_bytes:
            raise self._overload()
        self._bytes += num_bytes

    def leave(self, num_bytes: int) -> None:
        """Stop counting a request and its bytes."""
        self.ongoing -= 1
        self.let_go(num_bytes)

    def let_go(self, num_bytes: int) -> None:
        """Stop counting bytes."""
        self._bytes -= num_bytes

    def _overload(self) -> OverloadError:
        return OverloadError(f"{self.ongoing} requests of up to {self._bytes} bytes are here already: try again later")
