"""Inference from a replica's socket to the batcher without ASGI, for plain requests.

Most requests arrive in one piece, or nearly so, and a single version answers them. For each of them uvicorn's protocol
would create a task, a scope and several messages, which takes longer than a small model. Here they go straight to the
batcher. All other requests are left to uvicorn, with their bytes unchanged. So are invalid ones, so that errors are
reported in one place.

This uses private parts of uvicorn: ``cycle``, ``on_message_begin``, ``on_message_complete``, ``on_response_complete``,
``shutdown``, ``flow`` and the timer of idle connections.
"""

import asyncio
from typing import Any

from uvicorn.config import HTTP_PROTOCOLS, Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from app.errors import OverloadError, UnauthorizedError
from app.serving.protocol.rest import bytes_to_read
from app.serving.reading import ON_LOOP_BYTES
from app.serving.traffic import Outcome, outcome_of
from app.serving.transport.calls import START as CALL_START
from app.serving.transport.calls import CallConnection
from app.serving.transport.errors import error_response
from app.serving.transport.exchange import Exchange
from app.serving.transport.grpc import GrpcMethods
from app.serving.transport.head import MAX_HEAD_BYTES, START, RequestHead
from app.serving.transport.http import DirectInference
from app.serving.transport.prepared import PreparedRequest, PreparedRequests
from app.serving.transport.unary import UnaryService
from app.telemetry.tracing import RequestTrace
from app.tensors import Tensors

_MAX_HEADS = 1024
_MAX_BYTES = 256 * 2**10
"""Limit on a plain request. A larger one is left to uvicorn, which does not copy it with every part."""
_GATHER_S = 0.05
"""Time to receive the rest of a request. A slower one is left to uvicorn, which has its own limit."""


class HotRoute:
    """The shared state of a listener's connections."""

    def __init__(self, direct: DirectInference, methods: GrpcMethods) -> None:
        """Take requests and gRPC calls for the endpoint of ``direct``, within its limits."""
        self.direct = direct
        self.unary = UnaryService(methods, direct)
        self.answered = 0
        """The number of requests that took this route, including refused ones."""
        self._endpoint = direct.endpoint
        self._config = direct.endpoint.config
        self._heads: dict[bytes, RequestHead] = {}
        self._prepared = PreparedRequests()
        self._defaults: tuple[list[tuple[bytes, bytes]], bytes] = ([], b"")

    def head(self, data: bytes) -> RequestHead | None:
        """Read a head, usually a known one. Return None if the request is not plain, or not authorized."""
        self.forget_replaced()
        # A client sends the same head again and again.
        known = self._heads.get(data)
        if known or len(data) > MAX_HEAD_BYTES or (head := RequestHead.read(data)) is None:
            return known
        try:
            self._endpoint.access.check(head.caller)
        except UnauthorizedError:
            return None
        if len(self._heads) >= _MAX_HEADS:
            self._heads.clear()
        # Only authorized heads are kept, so a known one needs no check.
        self._heads[data] = head
        return head

    def forget_replaced(self) -> None:
        """Drop everything that was read for replaced models or tokens."""
        if self._config is not self._endpoint.config:
            self._config = self._endpoint.config
            self._heads.clear()
            self._prepared.clear()
            self.unary.forget_replaced()

    def read(self, head: RequestHead, body: bytes) -> tuple[PreparedRequest, Tensors] | None:
        """Read a body. Return None if something is wrong with the request, or more than one version answers it."""
        try:
            served = self._endpoint.route_single(head.model, head.version)
            # A cascade or a shadow needs the general path, and a slow read must not block the loop.
            if served is None or (
                len(body) > ON_LOOP_BYTES and bytes_to_read(body, head.lengths, served.inputs) > ON_LOOP_BYTES
            ):
                return None
            return self._prepared.read(served, head.model, body, head.lengths)
        except Exception:  # any error occurs again on uvicorn's way, and is reported there
            return None

    def begin_trace(self, head: RequestHead) -> RequestTrace | None:
        """Return the span of a request that is submitted now; None if it is not to be traced."""
        tracer = self._endpoint.traffic.tracer
        return tracer.begin("http", head.traceparent) if tracer else None

    def count(self, exchange: "HotExchange", outcome: Outcome, sent: int = 0) -> None:
        """Count a request that has ended, with an answer of so many bytes."""
        prepared = exchange.prepared
        model, version = prepared.request.model, prepared.served.version
        self._endpoint.traffic.add(model, version, "http", outcome, exchange.num_bytes, sent)
        if exchange.trace:
            exchange.trace.end(model, version, outcome)

    def default_lines(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Return the header lines of every response. uvicorn makes a new list of them each second."""
        if headers is not self._defaults[0]:
            self._defaults = headers, _lines(headers)
        return self._defaults[1]


class HotExchange(Exchange):
    """A plain request, whose connection waits for the answer."""

    __slots__ = ("_accepted", "_connection", "_direct", "num_bytes", "prepared")

    def __init__(
        self, connection: "HotProtocol", prepared: PreparedRequest, head: RequestHead, trace: RequestTrace | None
    ) -> None:
        super().__init__()
        self._connection = connection
        self.prepared = prepared
        self._accepted = head.accept_encoding
        self.num_bytes = head.num_bytes
        self.trace = trace
        self._direct: DirectInference | None = None

    def begin(self, direct: DirectInference, tensors: Tensors) -> None:
        """Submit the request, within the limits of ``direct``. Raises OverloadError."""
        direct.enter(self.num_bytes)
        self._direct = direct
        prepared = self.prepared
        self.submit(prepared.served, tensors, prepared.rows, prepared.shape, prepared.request.parameters)

    def end(self) -> None:
        """Release the request's room. Give it up if it is not answered yet."""
        if self._direct:
            self._direct.leave(self.num_bytes)
        self.give_up()

    def answer(self, outputs: Tensors) -> None:
        lines, body = self.prepared.write(outputs, self._accepted)
        if self.trace and (traceparent := self.trace.traceparent):
            lines += f"traceparent: {traceparent}\r\n".encode()
        self._connection.answer(self, 200, lines, body)

    def refuse(self, error: Exception) -> None:
        self._connection.refuse(self, error)


class HotProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with a shorter way for plain requests.

    A connection is in one of four states:

    - uvicorn owns it, from the first byte of a request that is not plain until uvicorn has answered all its requests.
    - A plain request waits for its answer, and further bytes are buffered.
    - ``CallConnection`` owns it, until the first bytes of a request that is not a gRPC call arrive.
    - It is idle, and the next bytes decide.

    Each request is routed anew, because HAProxy sends the requests of all clients over the same connections.
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
        self._exchange: HotExchange | None = None
        self._kept = b""  # bytes after a plain request, or its first part
        self._gathering: asyncio.TimerHandle | None = None
        self._is_uvicorn_reading = False
        self._is_leaving = False

    def data_received(self, data: bytes) -> None:
        # uvicorn keeps the connection until it has read and answered everything that it got.
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
            self._route.count(self._exchange, "cancelled")
            self._exchange.end()
            self._exchange = None
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self._exchange:
            self._is_leaving = True  # close once the request is answered
            return
        if self._kept:
            self._leave_kept_to_uvicorn()
        super().shutdown()

    def answer(self, exchange: HotExchange, status: int, lines: bytes, body: bytes, outcome: Outcome = "ok") -> None:
        """Respond to the waiting request, unless the client has gone."""
        # The client has disconnected, so the request was cancelled.
        if exchange is not self._exchange:
            return
        self._route.count(exchange, outcome, len(body))
        exchange.end()
        self._exchange = None
        self._route.answered += 1
        defaults = self._route.default_lines(self.server_state.default_headers)
        end = b"connection: close\r\n\r\n" if self._is_leaving else b"\r\n"
        self.transport.write(b"".join((STATUS_LINE[status], defaults, lines, end, body)))
        if self._is_leaving:
            self.transport.close()
        # uvicorn counts the request, starts its timer for idle connections, and resumes reading.
        self.on_response_complete()
        if self._kept:
            self._keep(self._kept)
            # Not at once: a pipelining client would keep the loop to itself, and its refused requests would recurse.
            self.loop.call_soon(self._go_on)

    def refuse(self, exchange: HotExchange, error: Exception) -> None:
        """Send an error to the waiting client."""
        if exchange.trace:
            exchange.trace.note_error(error)
        response = error_response(error, exchange.trace.traceparent if exchange.trace else None)
        lines, body = _lines(response.raw_headers), bytes(response.body)
        self.answer(exchange, response.status_code, lines, body, outcome_of(error))

    def _take(self, data: bytes) -> None:
        """Decide about bytes that uvicorn has not seen: requests, or a part of one."""
        # Otherwise uvicorn's timer for idle connections would close it while a request waits.
        self._unset_keepalive_if_required()
        self._kept = b""
        # Without the end of a head, ``find`` returns -1, and ``end`` is too small below.
        end = data.find(b"\r\n\r\n") + 4 if data.startswith(START) and self._is_free else 0
        head = self._route.head(data[:end]) if end > len(START) else None
        if head is None or end + head.num_bytes > _MAX_BYTES:
            self._pass_on(data)
        elif len(data) < end + head.num_bytes:
            self._gather(data)
        elif read := self._route.read(head, data[end : end + head.num_bytes]):
            self._stop_gathering()
            self._keep(data[end + head.num_bytes :])
            self._begin(HotExchange(self, read[0], head, self._route.begin_trace(head)), read[1])
        else:
            self._leave_to_uvicorn(data)

    def _pass_on(self, data: bytes) -> None:
        """Pass a request that is not plain to ``CallConnection`` or uvicorn, depending on its first bytes."""
        if not self._is_free or CALL_START[: len(data)] != data[: len(CALL_START)]:
            self._leave_to_uvicorn(data)
        elif len(data) < len(CALL_START):
            self._gather(data)
        else:
            self._hand_over(data)

    def _hand_over(self, data: bytes) -> None:
        """Hand the connection over to ``CallConnection``, until it receives something other than a call."""
        self._stop_gathering()
        self.flow.resume_reading()
        self.connections.discard(self)
        protocol = CallConnection(self._route.unary, self.connections, self.timeout_keep_alive, self._take_back)
        self.transport.set_protocol(protocol)
        # A transport calls this only for its first protocol.
        protocol.connection_made(self.transport)
        protocol.data_received(data)

    def _take_back(self, data: bytes) -> None:
        """Take the connection back after calls, with the first bytes of another request."""
        self.connections.add(self)
        self.transport.set_protocol(self)
        self._take(data)

    @property
    def _is_free(self) -> bool:
        """Whether this route may answer: the client reads its answers, and uvicorn has no prefix for paths."""
        return not self.flow.write_paused and not self.root_path

    def _begin(self, exchange: HotExchange, tensors: Tensors) -> None:
        self._exchange = exchange
        try:
            exchange.begin(self._route.direct, tensors)
        except OverloadError as error:
            self.refuse(exchange, error)

    def _go_on(self) -> None:
        """Process the bytes that arrived while a request waited."""
        if self._kept and self._exchange is None and not self.transport.is_closing():
            self._take(self._kept)

    def _keep(self, data: bytes) -> None:
        """Keep bytes after a request. Pause reading if there are many; ``on_response_complete`` resumes it."""
        self._kept = data
        if len(data) > _MAX_BYTES:
            self.flow.pause_reading()

    def _gather(self, data: bytes) -> None:
        self._kept = data
        if self._gathering is None:
            # One timer from the first part on, so that parts that trickle in do not extend it.
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
        # uvicorn has its own pauses, and would wait for the rest of a head.
        self.flow.resume_reading()
        super().data_received(data)


_routes: dict[asyncio.AbstractEventLoop, HotRoute] = {}
"""At most one entry: a process is one replica, or none."""


def listen_hot(route: HotRoute) -> None:
    """Use this route for the listeners that Serve opens on the running event loop.

    Serve leaves the choice of the protocol to uvicorn, which looks it up by name.
    """
    _routes[asyncio.get_running_loop()] = route
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{create_protocol.__name__}"


def create_protocol(
    config: Config,
    server_state: ServerState,
    app_state: dict[str, Any],
    _loop: asyncio.AbstractEventLoop | None = None,
) -> HttpToolsProtocol:
    """Return the protocol of a new connection: ours if the event loop has a route, else uvicorn's."""
    route = _routes.get(asyncio.get_running_loop())
    if route is None:
        return HttpToolsProtocol(config, server_state, app_state, _loop)
    return HotProtocol(route, config, server_state, app_state, _loop)


def _lines(headers: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join([name + b": " + value + b"\r\n" for name, value in headers])
