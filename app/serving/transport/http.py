"""An endpoint over HTTP: access, inference, and the way to the other routes.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import OverloadError, RayloomError, UnauthorizedError
from app.serving.access import Caller, headers_of
from app.serving.endpoint import Endpoint
from app.serving.protocol.compression import MAX_INFLATION, is_compressed
from app.serving.protocol.infer import LIMITS, InferRequest, InferResponse
from app.serving.protocol.rest import bytes_to_read, max_body_bytes, read_infer, write_infer
from app.serving.reading import ON_LOOP_BYTES
from app.serving.traffic import Asked, outcome_of
from app.serving.transport.asgi import AwaitedBodies, close_if_unread, has_body, read_body, unless_gone
from app.serving.transport.errors import error_response
from app.serving.transport.routes import DOCS_ASSETS, routes

ROOM_BYTES = 4 * 2**30
"""Default limit on the total size of all bodies in a replica."""
_OPEN_PATHS = ("/", "/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready")
_NATURAL = "/v1/"
_READING_PATHS = (_NATURAL, "/v2/repository/")
"""Prefixes of the paths, besides ``infer``, whose requests have bodies."""
_INFER = re.compile("/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")


class HttpApi:
    """The ASGI application. Inference, the most frequent request, bypasses the framework of the other routes."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._others = routes(endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        receive, send = close_if_unread(scope, receive, send)
        if error := self.refusal(scope):
            await error_response(error)(scope, receive, send)
        elif path := match_infer(scope):
            await self.infer(path, headers_of(scope), scope, receive, send)
        else:
            await self._others(scope, receive, send)

    def refusal(self, scope: Scope) -> UnauthorizedError | None:
        """Return the error of a request that is not allowed on its path, such as one without the token."""
        if scope["type"] == "http" and not _is_open(scope["path"]):
            try:
                self._endpoint.access.check(Caller.of(headers_of(scope)))
            except UnauthorizedError as error:
                return error
        return None

    async def infer(
        self, path: re.Match[str], headers: Mapping[str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer an authorized request for inference.

        Args:
            path: the match of ``match_infer``.
            headers: of the request, by their names in lower case.
        """
        asked = Asked()
        try:
            with self._endpoint.traffic.counted("http", headers.get("traceparent")) as asked:
                answered = await self._infer(path[1], path[2], headers, receive, asked)
        except Exception as error:
            await error_response(error, asked.traceparent)(scope, receive, send)
            return
        # The client has disconnected, so nobody would read an answer.
        if answered is None:
            return
        content, response_headers = answered
        # Sent after the block above: the request is counted with its answer, however slowly the client reads.
        raw = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in response_headers.items()]
        raw.append((b"content-length", b"%d" % len(content)))
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        await send({"type": "http.response.body", "body": content})

    async def _infer(
        self, name: str, version: str | None, headers: Mapping[str, str], receive: Receive, asked: Asked
    ) -> tuple[bytes, dict[str, str]] | None:
        """Return the body and the headers of an answer; None if the client has gone. Raises as the endpoint does."""
        body = await read_body(headers, receive, max_body_bytes(headers))
        asked.received = len(body)
        answered = await unless_gone(receive, self._ask(name, version, headers, body, asked))
        if answered is None:
            asked.outcome = "cancelled"
            return None
        request, response = answered
        content, response_headers = write_infer(response, request, headers.get("accept-encoding", ""))
        asked.sent = len(content)
        if asked.traceparent:
            response_headers["traceparent"] = asked.traceparent
        return content, response_headers

    async def _ask(
        self, name: str, version: str | None, headers: Mapping[str, str], body: bytes, asked: Asked
    ) -> tuple[InferRequest, InferResponse]:
        """Read a body, and return the request and its response. Raises the endpoint's errors."""
        found, reader = self._endpoint.find(name, version), self._endpoint.reader
        asked.model, asked.version = name, found.version
        encoding = headers.get("content-encoding")
        content = await reader.inflate(body, encoding, max_body_bytes(headers)) if encoding else body

        def read() -> InferRequest:
            return read_infer(content, headers, name, version, found.inputs)

        # Most requests are small, and take the shortest path.
        num_bytes = bytes_to_read(content, headers, found.inputs)
        request = read() if num_bytes <= ON_LOOP_BYTES else await reader.read(num_bytes, read, len(body))
        # Looked up only now, because a version can be replaced while a body arrives and is read.
        target = self._endpoint.route(name, version)
        asked.version = target.version
        return request, await target.infer(request)


class DirectInference:
    """Inference from a replica's socket to its endpoint, without Ray Serve's own work on each request.

    For each request Serve creates two tasks, a queue, identifiers, a log record and metrics. For a small request that
    is most of the work, and nothing is lost without it. The endpoint drops requests whose clients have gone, and counts
    what it does. This class limits the number of requests in the replica and their total size. A replica that stops
    waits for every connection of its HTTP server: Serve closes the listener, and then waits for uvicorn as long as for
    its own requests.

    Plain requests take an even shorter way (``hot``). They enter and leave here, too.
    """

    def __init__(self, endpoint: Endpoint, api: HttpApi, room_bytes: int = ROOM_BYTES) -> None:
        """Let ``api`` answer for ``endpoint``.

        Args:
            room_bytes: limit on the total size of all bodies; a compressed one counts as its largest possible content.
        """
        self.ongoing = 0
        """Number of requests that wait or run. Their bodies have arrived."""
        self.awaited = AwaitedBodies()
        self._bytes = 0  # of all bodies
        self.endpoint = endpoint
        self._api = api
        self._room_bytes = room_bytes

    def before(self, app: ASGIApp) -> ASGIApp:
        """Return an application that answers inference here, and leaves all other requests to ``app``.

        ``app`` gets a request once its body has arrived, because Serve gives a request a slot at its first byte.
        """

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if path := match_infer(scope):
                await self._infer(path, scope, receive, send)
            elif _reads_body(scope):
                await self._receive(app, scope, receive, send)
            else:
                await app(scope, receive, send)

        return answer

    async def _infer(self, path: re.Match[str], scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it if there are too many or they are too large in total.

        A request takes a slot once its body has arrived, so that slow clients do not take the slots of others. A
        request without its token takes no slot. Parts of a body that are read only to be dropped reserve no memory.
        """
        receive, send = close_if_unread(scope, receive, send)
        if refusal := self._api.refusal(scope):
            self.endpoint.traffic.add("", "", "http", outcome_of(refusal))
            await error_response(refusal)(scope, receive, send)
            return
        headers = headers_of(scope)
        with self._arriving(headers, receive, max_body_bytes(headers), takes_slot=True) as receive:
            await self._api.infer(path, headers, scope, receive, send)

    async def _receive(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Receive the body of a request that is not for ``infer``, then pass the request to ``app``."""
        receive, send = close_if_unread(scope, receive, send)
        if refusal := self._api.refusal(scope):
            await error_response(refusal)(scope, receive, send)
            return
        headers = headers_of(scope)
        with self._arriving(headers, receive, LIMITS.json_bytes) as receive_counted:
            try:
                body = await read_body(headers, receive_counted)
            except (RayloomError, TimeoutError) as error:
                if scope["path"].startswith(_NATURAL):
                    self.endpoint.traffic.add("", "", "natural", outcome_of(error))
                await error_response(error)(scope, receive, send)
                return
            whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive_again() -> Message:
                return whole.pop() if whole else await receive()

            await app(scope, receive_again, send)

    @contextmanager
    def _arriving(
        self, headers: Mapping[str, str], receive: Receive, max_bytes: int, takes_slot: bool = False
    ) -> Iterator[Receive]:
        """Yield a ``receive`` that counts a body's bytes until the block ends, at most ``max_bytes``.

        A body that has arrived counts as the largest size that it may inflate to, and then may take a slot.
        """
        number, factor = self.awaited.number(), _inflation(headers)
        received, held, has_arrived, has_entered = 0, 0, False, False

        async def receive_counted() -> Message:
            nonlocal received, held, has_arrived, has_entered
            # The body has arrived, so this waits for the client to disconnect.
            if has_arrived:
                return await receive()
            message = await self.awaited.next_part(number, receive, self.endpoint.config.max_requests)
            received += len(message.get("body", b""))
            has_arrived = message["type"] == "http.request" and not message.get("more_body")
            size = min(received * (factor if has_arrived else 1), max_bytes)
            self.hold(size - held)
            held = size
            if has_arrived and takes_slot:
                self.enter()
                has_entered = True
            return message

        try:
            yield receive_counted
        finally:
            self.release(held)
            self.ongoing -= has_entered

    def enter(self, num_bytes: int = 0) -> None:
        """Count a request until it leaves, and its bytes. Raises OverloadError if there are too many."""
        if self.ongoing >= self.endpoint.config.max_requests:
            raise self._overload()
        # If there is no room for the bytes, the request has not entered.
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
        self.release(num_bytes)

    def release(self, num_bytes: int) -> None:
        """Stop counting bytes."""
        self._bytes -= num_bytes

    def _overload(self) -> OverloadError:
        return OverloadError(f"{self.ongoing} requests of up to {self._bytes} bytes are here already: try again later")


def match_infer(scope: Scope) -> re.Match[str] | None:
    """Match the path of a request for ``infer``. Groups: the model, and the version or None."""
    is_post = scope["type"] == "http" and scope["method"] == "POST"
    return _INFER.fullmatch(scope["path"]) if is_post else None


def _inflation(headers: Mapping[str, str]) -> int:
    """Return the factor by which a body may expand.

    It is the worst case, because the real factor is known only after the memory is used.
    """
    encoding = headers.get("content-encoding")
    return MAX_INFLATION if encoding and is_compressed(encoding) else 1


def _reads_body(scope: Scope) -> bool:
    """Return whether a request has a body that one of the other routes reads."""
    return has_body(scope) and scope["method"] == "POST" and scope["path"].startswith(_READING_PATHS)


def _is_open(path: str) -> bool:
    """Return whether a path needs no token: health, for load balancers, and pages without data."""
    return path in _OPEN_PATHS or path.startswith(f"{DOCS_ASSETS}/")
