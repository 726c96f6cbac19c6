"""Inference from a replica's socket to the batcher without ASGI, for requests that are plain.

Most requests come whole, or nearly so, for one version by itself. uvicorn's protocol would make a task, a scope and
several messages of each, which take longer than a small model. Here they go to the batcher at once. All other requests
are left to uvicorn, as bytes that nobody has touched, and so are those that are wrong: one place tells errors.

It rests on what uvicorn keeps for itself: ``cycle``, ``on_message_begin``, ``on_message_complete``,
``on_response_complete``, ``shutdown``, ``flow`` and the timer of idle connections.
"""

import asyncio
from typing import Any

from uvicorn.config import HTTP_PROTOCOLS, Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from app.errors import OverloadError, UnauthorizedError
from app.serving.transport.calls import START as CALL_START
from app.serving.transport.calls import CallConnection
from app.serving.transport.errors import error_response
from app.serving.transport.exchange import Exchange
from app.serving.transport.grpc import GrpcMethods
from app.serving.transport.head import MAX_HEAD_BYTES, START, Head
from app.serving.transport.http import DirectInference
from app.serving.transport.prepared import Prepared, PreparedRequests
from app.serving.transport.unary import UnaryService
from app.tensors import Tensors

_MAX_HEADS = 1024
_MAX_BYTES = 256 * 2**10
"""Of a request. A larger one is left to uvicorn, which does not copy it with every part that comes."""
_GATHER_S = 0.05
"""For the rest of a request. A slower one is left to uvicorn, and bounded there."""


class HotRoute:
    """What the connections of a listener share."""

    def __init__(self, direct: DirectInference, methods: GrpcMethods) -> None:
        """Take requests and gRPC calls for the endpoint of ``direct``, within its bounds."""
        self.direct = direct
        self.unary = UnaryService(methods, direct)
        self.answered = 0
        """Requests that took this route, whatever they were told."""
        self._endpoint = direct.endpoint
        self._config = direct.endpoint.config
        self._heads: dict[bytes, Head] = {}
        self._prepared = PreparedRequests()
        self._defaults: tuple[list[tuple[bytes, bytes]], bytes] = ([], b"")

    def head(self, data: bytes) -> Head | None:
        """Read a head, most often one that came before. Return None if the request is not plain, or not allowed."""
        self.forget_replaced()
        known = self._heads.get(data)
        if known or len(data) > MAX_HEAD_BYTES or (head := Head.read(data)) is None:
            return known
        try:
            self._endpoint.access.check(head.authorization)
        except UnauthorizedError:
            return None
        if len(self._heads) >= _MAX_HEADS:
            self._heads.clear()
        self._heads[data] = head
        return head

    def forget_replaced(self) -> None:
        """Drop what was read for other models, or with another token."""
        if self._config is not self._endpoint.config:
            self._config = self._endpoint.config
            self._heads.clear()
            self._prepared.clear()
            self.unary.forget_replaced()

    def read(self, head: Head, body: bytes) -> tuple[Prepared, Tensors] | None:
        """Read a body. Return None if something is wrong with the request, or more than one version answers it."""
        try:
            served = self._endpoint.route_single(head.model, head.version)
            return self._prepared.read(served, head.model, body, head.lengths) if served else None
        except Exception:  # whatever it is, it happens again where errors are told
            return None

    def default_lines(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Return the header lines of every response. uvicorn makes a new list of them each second."""
        if headers is not self._defaults[0]:
            self._defaults = headers, _lines(headers)
        return self._defaults[1]


class _Exchange(Exchange):
    """A request whose connection waits for the answer."""

    __slots__ = ("_accepted", "_connection", "_direct", "_num_bytes", "_prepared")

    def __init__(self, connection: "HotProtocol", prepared: Prepared, head: Head) -> None:
        super().__init__()
        self._connection = connection
        self._prepared = prepared
        self._accepted = head.accept_encoding
        self._num_bytes = head.num_bytes
        self._direct: DirectInference | None = None

    def begin(self, direct: DirectInference, tensors: Tensors) -> None:
        """Ask the model, within the bounds of ``direct``. Raises OverloadError."""
        direct.enter(self._num_bytes)
        self._direct = direct
        prepared = self._prepared
        self.submit(prepared.served, tensors, prepared.rows, prepared.shape, prepared.request.parameters)

    def end(self) -> None:
        """Take no more room; a request that is not answered yet is given up."""
        if self._direct:
            self._direct.leave(self._num_bytes)
        self.give_up()

    def answer(self, outputs: Tensors) -> None:
        lines, body = self._prepared.write(outputs, self._accepted)
        self._connection.answer(self, 200, lines, body)

    def refuse(self, error: Exception) -> None:
        self._connection.refuse(self, error)


class HotProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with a shorter way for plain requests.

    A connection is in one of three states. uvicorn has it, from the first byte of a request that is not plain until it
    has answered all that it was given. Or a plain request waits for its answer, and what comes meanwhile is kept. Or
    neither, and the next bytes decide.
    """

    def __init__(
        self,
        route: HotRoute,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._route = route
        self._exchange: _Exchange | None = None
        self._kept = b""  # what came behind a plain request, or its beginning
        self._gathering: asyncio.TimerHandle | None = None
        self._is_uvicorn_reading = False
        self._is_leaving = False
        self._is_new = True

    def data_received(self, data: bytes) -> None:
        if self._is_new:
            data = self._kept + data
            self._is_new = len(data) < len(CALL_START) and CALL_START.startswith(data)
            self._kept = data if self._is_new else b""
            if self._is_new:
                return
            if data.startswith(CALL_START):
                self._hand_over(data)
                return
        if self._is_uvicorn_reading or (self.cycle is not None and not self.cycle.response_complete):
            super().data_received(data)
            return
        if self._kept:
            data = self._kept + data
        if self._exchange is None:
            self._take(data)
        else:
            self._keep(data)

    def on_message_begin(self) -> None:
        self._is_uvicorn_reading = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._is_uvicorn_reading = False
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_gathering()
        self._kept = b""
        if self._exchange:
            self._exchange.end()
            self._exchange = None
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self._exchange:
            self._is_leaving = True  # once it is answered
            return
        if self._kept:
            self._leave_kept_to_uvicorn()
        super().shutdown()

    def answer(self, exchange: _Exchange, status: int, lines: bytes, body: bytes) -> None:
        """Respond to the request that waits, unless the client has gone."""
        if exchange is not self._exchange:
            return
        exchange.end()
        self._exchange = None
        self._route.answered += 1
        defaults = self._route.default_lines(self.server_state.default_headers)
        end = b"connection: close\r\n\r\n" if self._is_leaving else b"\r\n"
        self.transport.write(b"".join((STATUS_LINE[status], defaults, lines, end, body)))
        if self._is_leaving:
            self.transport.close()
        self.on_response_complete()
        if self._kept:
            self._keep(self._kept)
            self.loop.call_soon(self._go_on)

    def refuse(self, exchange: _Exchange, error: Exception) -> None:
        """Tell the client that waits of an error."""
        response = error_response(error)
        self.answer(exchange, response.status_code, _lines(response.raw_headers), bytes(response.body))

    def _take(self, data: bytes) -> None:
        """Decide about bytes that uvicorn has not seen: one request or more, or the beginning of one."""
        self._unset_keepalive_if_required()
        self._kept = b""
        end = data.find(b"\r\n\r\n") + 4 if data.startswith(START) and self._is_free else 0
        head = self._route.head(data[:end]) if end > len(START) else None
        if head is None or end + head.num_bytes > _MAX_BYTES:
            self._leave_to_uvicorn(data)
        elif len(data) < end + head.num_bytes:
            self._gather(data)
        elif read := self._route.read(head, data[end : end + head.num_bytes]):
            self._stop_gathering()
            self._keep(data[end + head.num_bytes :])
            self._begin(_Exchange(self, read[0], head), read[1])
        else:
            self._leave_to_uvicorn(data)

    def _hand_over(self, data: bytes) -> None:
        """Hand the connection over to ``CallConnection``. HAProxy sends only calls over it."""
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        protocol = CallConnection(self._route.unary, self.connections, self.timeout_keep_alive)
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        protocol.data_received(data)

    @property
    def _is_free(self) -> bool:
        """Whether the client reads its answers, else uvicorn waits for it; and no prefix of paths is uvicorn's."""
        return not self.flow.write_paused and not self.root_path

    def _begin(self, exchange: _Exchange, tensors: Tensors) -> None:
        self._exchange = exchange
        try:
            exchange.begin(self._route.direct, tensors)
        except OverloadError as error:
            self.refuse(exchange, error)

    def _go_on(self) -> None:
        """Turn to what came while a request waited."""
        if self._kept and self._exchange is None and not self.transport.is_closing():
            self._take(self._kept)

    def _keep(self, data: bytes) -> None:
        """Keep what came behind a request. Read no more while it is large; ``on_response_complete`` reads again."""
        self._kept = data
        if len(data) > _MAX_BYTES:
            self.flow.pause_reading()

    def _gather(self, data: bytes) -> None:
        self._kept = data
        if self._gathering is None:
            self._gathering = self.loop.call_later(_GATHER_S, self._leave_kept_to_uvicorn)

    def _stop_gathering(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None

    def _leave_kept_to_uvicorn(self) -> None:
        kept, self._kept = self._kept, b""
        self._leave_to_uvicorn(kept)

    def _leave_to_uvicorn(self, data: bytes) -> None:
        self._stop_gathering()
        self.flow.resume_reading()  # uvicorn pauses by itself, and would wait for the rest of a head
        super().data_received(data)


_routes: dict[asyncio.AbstractEventLoop, HotRoute] = {}
"""At most one: a process is one replica, or none."""


def listen_hot(route: HotRoute) -> None:
    """Give this route to the listeners that Serve opens on the event loop that runs now.

    Serve leaves the choice of a protocol to uvicorn, which looks it up by name.
    """
    _routes[asyncio.get_running_loop()] = route
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{protocol_here.__name__}"


def protocol_here(
    config: Config,
    server_state: ServerState,
    app_state: dict[str, Any],
    _loop: asyncio.AbstractEventLoop | None = None,
) -> HttpToolsProtocol:
    """Return the protocol of a new connection: with this route where the event loop's replica has one."""
    route = _routes.get(asyncio.get_running_loop())
    if route is None:
        return HttpToolsProtocol(config, server_state, app_state, _loop)
    return HotProtocol(route, config, server_state, app_state, _loop)


def _lines(headers: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join([name + b": " + value + b"\r\n" for name, value in headers])
