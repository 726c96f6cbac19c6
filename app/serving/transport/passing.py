"""Requests for models that another pool's replicas hold, over HTTP and gRPC.

A replica of the shared pool gets them in four cases: HAProxy does not know yet where a model is, the body that names
the model is larger than HAProxy reads, the pool has no replica, or the cluster has no HAProxy. It passes them on
through Ray Serve, which starts a replica if there is none. Headers of the answer tell HAProxy where the next one goes.
"""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Protocol

import anyio
from grpc import StatusCode
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import OverloadError, RayloomError
from app.serving.access import Caller, headers_of
from app.serving.protocol.infer import LIMITS
from app.serving.protocol.management import IndexRequest, parse_body
from app.serving.protocol.openai.models import parse_name
from app.serving.protocol.rest import max_body_bytes
from app.serving.transport.asgi import close_if_unread, read_body, unless_gone
from app.serving.transport.errors import Refusal, error_response
from app.serving.transport.inference_call import Admission, InferenceCall, admitted

POOL_HEADER, MODEL_HEADER = b"x-rayloom-pool", b"x-rayloom-model"
"""They name the pool that answered a request which was passed on, and its model. HAProxy removes them."""

_MODEL = re.compile("(?:/v[12]|/v2/repository)/models/([^/]+)(?:/.*)?")
_STATE = re.compile("/v2/models/[^/]+/(?:ready|stats)")
"""Paths for a model's state, which monitoring polls."""
_NAMED_IN_BODY = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})
_INDEX = ("POST", "/v2/repository/index")
_LISTS = {("GET", "/v1/models"): "data", ("GET", "/v1/predict"): "", ("GET", "/v2/models/stats"): "model_stats"}
"""Requests that list all models, and the key of the list in the answer; "": the answer is a list."""
_AHEAD = 16
"""Messages of an answer that wait to be passed on."""


@dataclass(frozen=True)
class PassedRequest:
    """A whole HTTP request."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


@dataclass(frozen=True)
class PassedCall:
    """A whole unary gRPC call."""

    method: str
    message: bytes
    metadata: tuple[tuple[str, str], ...]
    peer: str


@dataclass(frozen=True)
class CallAnswer:
    """The answer to a gRPC call. An error has an empty message."""

    message: bytes
    code: int
    """gRPC's number of the status, which can be pickled."""
    details: str
    trailers: tuple[tuple[str, str], ...]

    @property
    def refusal(self) -> Refusal:
        """The reply to the client, if the answer is an error."""
        code = next(code for code in StatusCode if code.value[0] == self.code)
        after_s = dict(self.trailers).get("retry-after")
        return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, code, self.details, int(after_s) if after_s else None)


class PoolState(StrEnum):
    """Whether a pool can answer. The value ends a sentence about the pool."""

    AWAKE = "has a replica that runs"
    STARTING = "has no replica that runs yet: try again later"
    ASLEEP = "has no replica: a request starts one"
    FAILING = "has no replica, and none can start: 'serve status' says why; deploy its models again, or try again later"
    UNDEPLOYED = "is no longer deployed: try again"


class Pools(Protocol):
    """The other pools."""

    async def state_of(self, pool: str) -> PoolState:
        """Return a pool's state, at most a second old if Serve's controller answers."""
        ...

    def ask(self, pool: str, request: PassedRequest) -> AsyncGenerator[Message, None]:
        """Return the messages of a pool's answer. Raises OverloadError if no replica answers."""
        ...

    async def call(self, pool: str, call: PassedCall) -> CallAnswer:
        """Return a pool's answer to a gRPC call. Raises OverloadError if no replica answers."""
        ...


class PassOn:
    """An ASGI application that passes on what other pools answer, and leaves other requests to ``app``."""

    def __init__(self, admission: Admission, pools: Pools, app: ASGIApp, takes_slot: bool) -> None:
        """Wrap an application.

        Args:
            takes_slot: whether a request needs a slot. Otherwise Serve has given it one.
        """
        self._admission = admission
        self._pools = pools
        self._app = app
        self._takes_slot = takes_slot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        elsewhere = self._admission.endpoint.config.elsewhere
        if not elsewhere or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        key, named = (scope["method"], scope["path"]), _MODEL.fullmatch(scope["path"])
        if key == _INDEX or key in _LISTS:
            if self._takes_slot:  # from HAProxy, and on its way through Serve, where it gets here again
                await self._app(scope, receive, send)
                return
            await self._list(scope, receive, send, sorted(set(elsewhere.values())))
        elif named and (pool := elsewhere.get(named[1])) is not None:
            if _STATE.fullmatch(scope["path"]) and await self._pools.state_of(pool) is PoolState.ASLEEP:
                await self._app(scope, receive, send)
            else:
                await self._pass_on(named[1], scope, receive, send)
        elif scope["method"] == "POST" and scope["path"] in _NAMED_IN_BODY:
            await self._pass_on(None, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _pass_on(self, model: str | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on. Without a model, the body says which one, maybe one of this pool."""
        receive, send = close_if_unread(scope, receive, send)
        headers = headers_of(scope)
        with InferenceCall(self._admission, None) as call:
            try:
                self._admission.require_access(Caller.of(headers))
                max_bytes = max_body_bytes(headers) if model else LIMITS.json_bytes
                arriving = admitted(receive, call, headers, max_bytes, self._takes_slot)
                body = await read_body(headers, arriving, max_bytes)
                model = model or await self._named_in(headers, body)
                if (pool := self._admission.endpoint.config.elsewhere.get(model)) is not None:
                    await unless_gone(receive, self._answer(pool, model, _request(scope, body), send))
                    return
            except (RayloomError, TimeoutError) as error:
                await error_response(error, path=scope["path"])(scope, receive, send)
                return
        await self._app(scope, _again(body, receive), send)

    async def _named_in(self, headers: Mapping[str, str], body: bytes) -> str:
        """Return the model that a body names. A large body is read in a thread."""
        reader = self._admission.endpoint.reader
        content = await reader.inflate(body, headers.get("content-encoding", ""), LIMITS.json_bytes)
        return await reader.read(len(content), lambda: _named_in(content), len(body))

    async def _answer(self, pool: str, model: str, request: PassedRequest, send: Send) -> None:
        """Send a pool's answer.

        Raises:
            OverloadError: no replica answers.
            ConnectionAbortedError: the replica is lost in the middle of its answer.
        """
        has_begun = False
        try:
            async with aclosing(self._pools.ask(pool, request)) as messages:
                async for message in messages:
                    if not has_begun:
                        message = {**message, "headers": [*message["headers"], *learned(model, pool)]}
                    has_begun = True
                    await send(message)
        except OverloadError as error:
            if has_begun:
                # The server closes the connection, as after the end of a replica that answers itself.
                raise ConnectionAbortedError(str(error)) from error
            raise

    async def _list(self, scope: Scope, receive: Receive, send: Send, pools: list[str]) -> None:
        """Answer with what this pool lists, and then the others. Pools without a replica are not woken.

        The index says which pools cannot be asked. Other lists leave their models out.
        """
        headers = headers_of(scope)
        try:
            self._admission.require_access(Caller.of(headers))
            request = _request(scope, await read_body(headers, receive, LIMITS.json_bytes))
            own = await _whole(messages_of(self._app, request))
        except (RayloomError, TimeoutError) as error:
            await error_response(error, path=scope["path"])(scope, receive, send)
            return
        if own.status_code != HTTPStatus.OK:
            await own(scope, receive, send)
            return
        listed = await asyncio.gather(*(self._listed(pool, request) for pool in pools))
        key = _LISTS.get((scope["method"], scope["path"]), "")
        await _joined([own, *(one for one in listed if one is not None)], key)(scope, receive, send)

    async def _listed(self, pool: str, request: PassedRequest) -> Response | None:
        state = await self._pools.state_of(pool)
        reason = f"pool {pool} {state}"
        if state is PoolState.AWAKE:
            try:
                answer = await _whole(self._pools.ask(pool, request))
                if answer.status_code == HTTPStatus.OK:
                    return answer
                reason = f"pool {pool} answers with status {answer.status_code}"
            except OverloadError as error:
                reason = str(error)
        if (request.method, request.path) != _INDEX or parse_body(IndexRequest, request.body).ready:
            return None
        return Response(json.dumps([model.model_dump() for model in self._admission.endpoint.index_of(pool, reason)]))


def learned(model: str, pool: str) -> list[tuple[bytes, bytes]]:
    """Return the headers by which HAProxy learns a model's pool."""
    return [(POOL_HEADER, pool.encode()), (MODEL_HEADER, model.encode())]


def _named_in(content: bytes) -> str:
    """Return the model that an OpenAI request names; an empty text if it names none, which the model's pool refuses."""
    try:
        model = json.loads(content)["model"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return parse_name(model)[0] if isinstance(model, str) else ""


def _request(scope: Scope, body: bytes) -> PassedRequest:
    return PassedRequest(scope["method"], scope["path"], scope["query_string"], tuple(scope["headers"]), body)


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a channel that first gives a body that was read already."""
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return whole.pop() if whole else await receive()

    return receive_again


async def messages_of(app: ASGIApp, request: PassedRequest) -> AsyncGenerator[Message, None]:
    """Yield the messages with which an application answers a request. Closing the generator disconnects the client."""
    writer, reader = anyio.create_memory_object_stream[Message](_AHEAD)
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "method": request.method,
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": list(request.headers),
        "client": None,
        "server": None,
        "state": {},
    }

    async def disconnected() -> Message:
        await asyncio.Event().wait()  # the task is cancelled instead
        return {"type": "http.disconnect"}

    async def answer() -> None:
        async with writer:
            await app(scope, _again(request.body, disconnected), writer.send)

    task = asyncio.create_task(answer())
    try:
        async with reader:
            async for message in reader:
                yield message
        await task
    finally:
        task.cancel()


async def _whole(messages: AsyncIterator[Message]) -> Response:
    """Return an answer as a response."""
    status, parts = HTTPStatus.SERVICE_UNAVAILABLE, list[bytes]()
    async for message in messages:
        status = message.get("status", status)
        parts.append(message.get("body", b""))
    return Response(b"".join(parts), status, media_type="application/json")


def _joined(lists: list[Response], key: str) -> Response:
    """Return one list of all."""
    contents = [json.loads(bytes(one.body)) for one in lists]
    if not key:
        return Response(json.dumps([item for content in contents for item in content]), media_type="application/json")
    whole = {**contents[0], key: [item for content in contents for item in content[key]]}
    return Response(json.dumps(whole), media_type="application/json")
