"""An endpoint over HTTP: inference by ASGI, and the way to the other routes.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
"""

import asyncio
import re
from collections.abc import Mapping, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import RayloomError, UnauthorizedError
from app.serving.access import Caller, headers_of
from app.serving.protocol.compression import MAX_INFLATION, is_compressed
from app.serving.protocol.infer import LIMITS, InferRequest, InferResponse
from app.serving.protocol.rest import bytes_to_read, max_body_bytes, read_infer, write_infer
from app.serving.reading import ON_LOOP_BYTES
from app.serving.traffic import Protocol
from app.serving.transport.asgi import close_if_unread, has_body, read_body, unless_gone
from app.serving.transport.errors import error_response
from app.serving.transport.inference_call import Admission, InferenceCall
from app.serving.transport.routes import DOCS_ASSETS, routes
from app.tensors import TensorSpec

_OPEN_PATHS = ("/", "/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready")
_PREDICT = "/v1/"
_READING_PATHS = (_PREDICT, "/v2/repository/")
"""Prefixes of the paths, besides ``infer``, whose requests have bodies."""
_INFER = re.compile("/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")


class HttpApi:
    """The ASGI application. Inference, the most frequent request, bypasses the framework of the other routes.

    ``in_front_of`` lets it bypass Ray Serve, too. For each request Serve creates two tasks, a queue, identifiers, a log
    record and metrics. For a small request that is most of the work, and nothing is lost without it. A replica that
    stops waits for every connection of its HTTP server: Serve closes the listener, and then waits for uvicorn as long
    as for its own requests.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._others = routes(admission)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, to which Serve has given one of its slots."""
        receive, send = close_if_unread(scope, receive, send)
        if path := match_infer(scope):
            await self._infer(path, scope, receive, send, takes_slot=False)
        elif await self._has_access(scope, receive, send):
            await self._others(scope, receive, send)

    def in_front_of(self, app: ASGIApp) -> ASGIApp:
        """Return an application that answers inference here, and leaves all other requests to ``app``.

        ``app`` gets a request once its body has arrived, because Serve gives a request a slot at its first byte.
        """

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if path := match_infer(scope):
                receive, send = close_if_unread(scope, receive, send)
                await self._infer(path, scope, receive, send, takes_slot=True)
            elif _reads_body(scope):
                receive, send = close_if_unread(scope, receive, send)
                if await self._has_access(scope, receive, send):
                    await self._receive(app, scope, receive, send)
            else:
                await app(scope, receive, send)

        return answer

    async def _has_access(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Return whether a request may be answered. If not, refuse it."""
        if scope["type"] != "http" or _is_open(scope["path"]):
            return True
        try:
            self._admission.require_access(Caller.of(headers_of(scope)))
        except UnauthorizedError as error:
            InferenceCall(self._admission, _protocol_of(scope)).count(error)
            await error_response(error)(scope, receive, send)
            return False
        return True

    async def _infer(self, path: re.Match[str], scope: Scope, receive: Receive, send: Send, takes_slot: bool) -> None:
        """Answer a request for inference.

        A request takes a slot once its body has arrived, so that slow clients do not take the slots of others. A
        request without its token takes none. Parts of a body that are read only to be dropped take no room.

        Args:
            path: the match of ``match_infer``.
        """
        headers = headers_of(scope)
        with InferenceCall(self._admission, "http") as call:
            try:
                with call.counted():
                    self._admission.require_access(Caller.of(headers))
                    call.begin_trace(headers.get("traceparent"))
                    receive = _admitted(receive, call, headers, max_body_bytes(headers), takes_slot)
                    content, response_headers = await _answer(call, path[1], path[2], headers, receive)
            except Exception as error:
                await error_response(error, call.traceparent)(scope, receive, send)
                return
            # Sent after the block above: the request is counted with its answer, however slowly the client reads.
            raw = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in response_headers.items()]
            raw.append((b"content-length", b"%d" % len(content)))
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            await send({"type": "http.response.body", "body": content})

    async def _receive(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Receive the body of a request that is not for ``infer``, then pass the request to ``app``."""
        headers = headers_of(scope)
        with InferenceCall(self._admission, _protocol_of(scope)) as call:
            try:
                body = await read_body(headers, _admitted(receive, call, headers, LIMITS.json_bytes, takes_slot=False))
            except (RayloomError, TimeoutError) as error:
                call.count(error)
                await error_response(error)(scope, receive, send)
                return
            whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive_again() -> Message:
                return whole.pop() if whole else await receive()

            await app(scope, receive_again, send)


def _admitted(
    receive: Receive, call: InferenceCall, headers: Mapping[str, str], max_bytes: int, takes_slot: bool
) -> Receive:
    """Return a ``receive`` that takes room for a body as it arrives, for at most ``max_bytes``.

    A body that has arrived takes the room of what it may inflate to, and then may take a slot.
    """
    received, has_arrived = 0, False

    async def receive_admitted() -> Message:
        nonlocal received, has_arrived
        # The body has arrived, so this waits for the client to disconnect.
        if has_arrived:
            return await receive()
        message = await _next_part(receive, call)
        received += len(message.get("body", b""))
        has_arrived = message["type"] == "http.request" and not message.get("more_body")
        call.hold(min(received * (_inflation(headers) if has_arrived else 1), max_bytes))
        if has_arrived and takes_slot:
            call.enter()
        return message

    return receive_admitted


async def _next_part(receive: Receive, call: InferenceCall) -> Message:
    """Wait for the next part of a body. Raises OverloadError if the body was given up for others."""
    wait = asyncio.timeout(None)
    try:
        async with wait:
            call.await_body(lambda: wait.reschedule(0))
            return await receive()
    except TimeoutError:
        raise call.too_slow() from None
    finally:
        call.arrived()


async def _answer(
    call: InferenceCall, name: str, version: str | None, headers: Mapping[str, str], receive: Receive
) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of an answer. Raises as the endpoint does."""
    body = await read_body(headers, receive, max_body_bytes(headers))
    call.received = len(body)
    reader = call.admission.endpoint.reader

    async def read(inputs: Sequence[TensorSpec]) -> InferRequest:
        encoding = headers.get("content-encoding")
        content = await reader.inflate(body, encoding, max_body_bytes(headers)) if encoding else body
        num_bytes = bytes_to_read(content, headers, inputs)
        # Most requests are small, and take the shortest path.
        if num_bytes <= ON_LOOP_BYTES:
            return read_infer(content, headers, name, version, inputs)
        return await reader.read(num_bytes, lambda: read_infer(content, headers, name, version, inputs), len(body))

    async def ask() -> tuple[InferRequest, InferResponse]:
        request, target = await call.route(name, version, read)
        return request, await call.run(target.infer(request))

    request, response = await unless_gone(receive, ask())
    content, response_headers = write_infer(response, request, headers.get("accept-encoding", ""))
    call.sent = len(content)
    if call.traceparent:
        response_headers["traceparent"] = call.traceparent
    return content, response_headers


def match_infer(scope: Scope) -> re.Match[str] | None:
    """Match the path of a request for ``infer``. Groups: the model, and the version or None."""
    is_post = scope["type"] == "http" and scope["method"] == "POST"
    return _INFER.fullmatch(scope["path"]) if is_post else None


def _protocol_of(scope: Scope) -> Protocol | None:
    """Return the protocol by which a request other than ``infer`` is counted; None if it asks no model."""
    return "natural" if scope["method"] == "POST" and scope["path"].startswith(_PREDICT) else None


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
