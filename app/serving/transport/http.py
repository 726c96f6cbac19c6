"""An endpoint over HTTP: inference by ASGI, and the way to the other routes.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
"""

import re
from collections.abc import Mapping, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import RayloomError, UnauthorizedError
from app.serving.access import Caller, headers_of
from app.serving.protocol.infer import LIMITS, InferRequest, InferResponse
from app.serving.protocol.openai.errors import speaks_openai
from app.serving.protocol.rest import bytes_to_read, max_body_bytes, read_infer, write_infer
from app.serving.reading import ON_LOOP_BYTES
from app.serving.traffic import Protocol
from app.serving.transport.asgi import close_if_unread, has_body, read_body, unless_gone
from app.serving.transport.errors import error_response
from app.serving.transport.generation import GenerationApi, is_generation
from app.serving.transport.inference_call import Admission, InferenceCall, admitted
from app.serving.transport.passing import PassOn, Pools
from app.serving.transport.routes import DOCS_ASSETS, OPEN_PATHS, routes
from app.tensors import TensorSpec

_PREDICT = "/v1/"
_SERVES_OWN = "/-/"
"""Prefix of Serve's own paths, which have no other one."""
_READING_PATHS = (_PREDICT, "/v2/repository/")
"""Prefixes of the paths, besides ``infer``, whose requests have bodies."""
_INFER = re.compile("/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")


class HttpApi:
    """The ASGI application. Inference and generation bypass the framework of the other routes.

    ``in_front_of`` lets it bypass Ray Serve, too. For each request Serve creates two tasks, a queue, identifiers, a log
    record and metrics. For a small request that is most of the work, and nothing is lost without it. A replica that
    stops waits for every connection of its HTTP server: Serve closes the listener, and then waits for uvicorn as long
    as for its own requests.
    """

    def __init__(self, admission: Admission, pools: Pools | None = None) -> None:
        """Answer what ``admission`` admits, and pass on what ``pools`` answer."""
        self.prefix = ""
        """The prefix of the paths that Serve sends here. HAProxy sends them without it, too."""
        self._admission = admission
        self._pools = pools
        self._generation = GenerationApi(admission)
        self._others = routes(admission)
        self._through_serve = self._passing_on(self._answer, takes_slot=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, to which Serve has given one of its slots."""
        await self._through_serve(_without_prefix(scope, self.prefix), receive, send)

    def _passing_on(self, app: ASGIApp, takes_slot: bool) -> ASGIApp:
        return PassOn(self._admission, self._pools, app, takes_slot) if self._pools else app

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        receive, send = close_if_unread(scope, receive, send)
        if path := match_infer(scope):
            await self._infer(path, scope, receive, send, takes_slot=False)
        elif is_generation(scope):
            await self._generation.answer(scope, receive, send, takes_slot=False)
        elif await self._has_access(scope, receive, send):
            await self._others(scope, receive, send)

    def in_front_of(self, app: ASGIApp) -> ASGIApp:
        """Return an application that answers inference and generates here, and leaves other requests to ``app``.

        ``app`` gets a request once its body has arrived, because Serve gives a request a slot at its first byte.
        """

        serve = _with_prefix(app, self.prefix)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if path := match_infer(scope):
                receive, send = close_if_unread(scope, receive, send)
                await self._infer(path, scope, receive, send, takes_slot=True)
            elif is_generation(scope):
                receive, send = close_if_unread(scope, receive, send)
                await self._generation.answer(scope, receive, send, takes_slot=True)
            elif _reads_body(scope):
                receive, send = close_if_unread(scope, receive, send)
                if await self._has_access(scope, receive, send):
                    await self._receive(serve, scope, receive, send)
            else:
                await serve(scope, receive, send)

        first = self._passing_on(answer, takes_slot=True)
        if not self.prefix:
            return first

        async def without_prefix(scope: Scope, receive: Receive, send: Send) -> None:
            await first(_without_prefix(scope, self.prefix), receive, send)

        return without_prefix

    async def _has_access(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Return whether a request may be answered. If not, refuse it."""
        if scope["type"] != "http" or _is_open(scope["path"]):
            return True
        try:
            self._admission.require_access(Caller.of(headers_of(scope)))
        except UnauthorizedError as error:
            InferenceCall(self._admission, _protocol_of(scope)).count(error)
            await error_response(error, path=scope["path"])(scope, receive, send)
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
                    receive = admitted(receive, call, headers, max_body_bytes(headers), takes_slot)
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
                body = await read_body(headers, admitted(receive, call, headers, LIMITS.json_bytes, takes_slot=False))
            except (RayloomError, TimeoutError) as error:
                call.count(error)
                await error_response(error, path=scope["path"])(scope, receive, send)
                return
            whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive_again() -> Message:
                return whole.pop() if whole else await receive()

            await app(scope, receive_again, send)


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
        request, target = await call.route(name, version, read, takes_tensors=True)
        return request, await call.run(target.infer(request))

    request, response = await unless_gone(receive, ask())
    content, response_headers = write_infer(response, request, headers.get("accept-encoding", ""))
    call.sent = len(content)
    if call.traceparent:
        response_headers["traceparent"] = call.traceparent
    return content, response_headers


def _without_prefix(scope: Scope, prefix: str) -> Scope:
    """Return a request whose path does not begin with a prefix."""
    if not prefix or scope["type"] != "http" or not scope["path"].startswith(f"{prefix}/"):
        return scope
    return {**scope, "path": scope["path"].removeprefix(prefix), "root_path": ""}


def _with_prefix(app: ASGIApp, prefix: str) -> ASGIApp:
    """Return an application that calls Serve's with the prefix that Serve expects."""
    if not prefix:
        return app

    async def prefixed(scope: Scope, receive: Receive, send: Send) -> None:
        is_ours = scope["type"] == "http" and not scope["path"].startswith(_SERVES_OWN)
        await app({**scope, "path": f"{prefix}{scope['path']}"} if is_ours else scope, receive, send)

    return prefixed


def match_infer(scope: Scope) -> re.Match[str] | None:
    """Match the path of a request for ``infer``. Groups: the model, and the version or None."""
    is_post = scope["type"] == "http" and scope["method"] == "POST"
    return _INFER.fullmatch(scope["path"]) if is_post else None


def _protocol_of(scope: Scope) -> Protocol | None:
    """Return the protocol by which a request other than ``infer`` is counted; None if it asks no model."""
    if scope["method"] != "POST" or not scope["path"].startswith(_PREDICT):
        return None
    return "openai" if speaks_openai(scope["path"]) else "natural"


def _reads_body(scope: Scope) -> bool:
    """Return whether a request has a body that one of the other routes reads."""
    return has_body(scope) and scope["method"] == "POST" and scope["path"].startswith(_READING_PATHS)


def _is_open(path: str) -> bool:
    """Return whether a path needs no token: one of ``OPEN_PATHS``, or a script or style of ``/docs``."""
    return path in OPEN_PATHS or path.startswith(f"{DOCS_ASSETS}/")
