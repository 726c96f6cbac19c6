"""Inference from a replica's socket to the batcher without ASGI, for plain requests.

Most requests arrive in one piece, or nearly so, and a single version answers them. For each of them uvicorn's protocol
would create a task, a scope and several messages, which takes longer than a small model. Here they go straight to the
batcher. All other requests are left to uvicorn, with their bytes unchanged. So are invalid ones, so that errors are
reported in one place.

This uses private parts of uvicorn: ``cycle``, ``on_message_begin``, ``on_message_complete``, ``on_response_complete``,
``shutdown``, ``flow``, ``pause_writing``, ``resume_writing`` and the timer of idle connections.
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.config import HTTP_PROTOCOLS, Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from app.errors import OverloadError, UnauthorizedError
from app.serving.access import Caller
from app.serving.protocol.rest import JSON_LENGTH, bytes_to_read
from app.serving.reading import ON_LOOP_BYTES
from app.serving.transport.errors import error_response
from app.serving.transport.fast_grpc import START as GRPC_START
from app.serving.transport.fast_grpc import GrpcConnection, GrpcFastPath
from app.serving.transport.grpc import GrpcMethods
from app.serving.transport.inference_call import Admission, TasklessCall
from app.serving.transport.prepared import PreparedRequest, PreparedRequests
from app.tensors import Tensors

_START = b"POST /v2/models/"
"""The first bytes of every plain request."""
_PATH = re.compile(rb"/v2/models/([\w.~+-]+)(?:/versions/([\w.~+-]+))?/infer")
_NOT_PLAIN = frozenset({"content-encoding", "expect", "transfer-encoding", "upgrade"})
_MAX_DIGITS = 18
_MAX_HEADS, _MAX_HEAD_BYTES = 1024, 4096
_MAX_BYTES = 256 * 2**10
"""Limit on a plain request. A larger one is left to uvicorn, which does not copy it with every part."""
_GATHER_S = 0.05
"""Time to receive the rest of a request. A slower one is left to uvicorn, which has its own limit."""
_SEND_TIMEOUT_S = 60.0
"""Default of ``FastPath.send_timeout_s``, as in nginx."""


@dataclass(frozen=True, slots=True)
class HttpHead:
    """The head of a plain request."""

    model: str
    version: str | None
    num_bytes: int
    """The size of the body."""
    accept_encoding: str
    caller: Caller
    lengths: Mapping[str, str]
    """The headers with lengths, which are needed to read the body."""
    traceparent: str | None

    @classmethod
    def read(cls, head: bytes) -> "HttpHead | None":
        """Read the bytes before the body. Return None if the request is not plain, or not valid."""
        callbacks = _HeadParser()
        parser = HttpRequestParser(callbacks)
        try:
            parser.feed_data(head)
        except (HttpParserError, HttpParserUpgrade):
            return None

        headers, path = dict(callbacks.lines), _PATH.fullmatch(callbacks.url)
        if not callbacks.is_complete or path is None or parser.get_method() != b"POST":
            return None
        # Other versions, and connections that end with the answer, take the general path.
        if parser.get_http_version() != "1.1" or not parser.should_keep_alive():
            return None
        if len(headers) < len(callbacks.lines) or headers.keys() & _NOT_PLAIN:
            # A repeated header is ambiguous.
            return None

        lengths = {name: headers[name] for name in ("content-length", JSON_LENGTH) if name in headers}
        # So does a request without a body: the general path tells what is missing.
        if not headers.get("content-length", "0").strip("0") or any(map(_is_long, lengths.values())):
            return None
        return cls(
            model=path[1].decode(),
            version=path[2].decode() if path[2] else None,
            num_bytes=int(lengths["content-length"]),
            accept_encoding=headers.get("accept-encoding", ""),
            caller=Caller.of(headers),
            lengths=lengths,
            traceparent=headers.get("traceparent"),
        )


def _is_long(length: str) -> bool:
    return len(length) > _MAX_DIGITS


class _HeadParser:
    """The callbacks of httptools' parser."""

    def __init__(self) -> None:
        self.url = b""
        self.lines: list[tuple[str, str]] = []
        self.is_complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.lines.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        self.is_complete = True

    def on_body(self, _: bytes) -> None:
        self.is_complete = False  # with other line ends, the head has ended before


class FastPath:
    """The shared state of a listener's connections."""

    def __init__(self, admission: Admission, methods: GrpcMethods) -> None:
        """Take requests, and gRPC calls of ``methods``, that ``admission`` admits."""
        self.admission = admission
        self.send_timeout_s = _SEND_TIMEOUT_S
        """A connection is closed if its client reads nothing of an answer for this long."""
        self.grpc = GrpcFastPath(methods, admission)
        self.answered = 0
        """The number of requests that took this path, including refused ones."""
        self._heads: dict[bytes, HttpHead] = {}
        self._prepared = PreparedRequests()
        self._defaults: tuple[list[tuple[bytes, bytes]], bytes] = ([], b"")
        admission.endpoint.on_update(self._heads.clear)
        admission.endpoint.on_update(self._prepared.clear)

    def head(self, data: bytes) -> HttpHead | None:
        """Read a head, usually a known one. Return None if the request is not plain, or not authorized."""
        # A client sends the same head again and again.
        known = self._heads.get(data)
        if known or len(data) > _MAX_HEAD_BYTES or (head := HttpHead.read(data)) is None:
            return known
        try:
            self.admission.require_access(head.caller)
        except UnauthorizedError:
            return None
        if len(self._heads) >= _MAX_HEADS:
            self._heads.clear()
        # Only authorized heads are kept, so a known one needs no check.
        self._heads[data] = head
        return head

    def read(self, head: HttpHead, body: bytes) -> tuple[PreparedRequest, Tensors] | None:
        """Read a body. Return None if something is wrong with the request, or more than one version answers it."""
        try:
            served = self.admission.endpoint.route_single(head.model, head.version)
            # A cascade or a shadow needs the general path, and a slow read must not block the loop.
            if served is None or (
                len(body) > ON_LOOP_BYTES and bytes_to_read(body, head.lengths, served.inputs) > ON_LOOP_BYTES
            ):
                return None
            return self._prepared.read(served, head.model, body, head.lengths)
        except Exception:  # any error occurs again on uvicorn's way, and is reported there
            return None

    def default_lines(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Return the header lines of every response. uvicorn makes a new list of them each second."""
        if headers is not self._defaults[0]:
            self._defaults = headers, _lines(headers)
        return self._defaults[1]


class FastHttpCall(TasklessCall):
    """A plain request, whose connection waits for the answer."""

    __slots__ = ("_accepted", "_connection", "_prepared")

    def __init__(
        self, connection: "FastHttpProtocol", admission: Admission, head: HttpHead, prepared: PreparedRequest
    ) -> None:
        super().__init__(admission, "http")
        self._connection = connection
        self._prepared = prepared
        self._accepted = head.accept_encoding
        self.received = head.num_bytes
        self.begin_trace(head.traceparent)

    def begin(self, tensors: Tensors) -> None:
        """Submit the request, whose body is here, or refuse it."""
        try:
            self.hold(self.received)
            self.enter()
            self.submit(self._prepared, tensors)
        except OverloadError as error:
            self.refuse(error)

    def send_answer(self, outputs: Tensors) -> None:
        lines, body = self._prepared.write(outputs, self._accepted)
        if traceparent := self.traceparent:
            lines += f"traceparent: {traceparent}\r\n".encode()
        self.sent = len(body)
        self.count()
        self._connection.respond(self, 200, lines, body)

    def send_error(self, error: Exception) -> None:
        response = error_response(error, self.traceparent)
        self._connection.respond(self, response.status_code, _lines(response.raw_headers), bytes(response.body))


class FastHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with a shorter path for plain requests.

    A connection is in one of four states:

    - uvicorn owns it, from the first byte of a request that is not plain until uvicorn has answered all its requests.
    - A plain request waits for its answer, and further bytes are buffered.
    - ``GrpcConnection`` owns it, until the first bytes of a request that is not a gRPC call arrive.
    - It is idle, and the next bytes decide.

    Each request is routed anew, because HAProxy sends the requests of all clients over the same connections.
    """

    def __init__(
        self,
        fast_path: FastPath,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._fast_path = fast_path
        self._call: FastHttpCall | None = None
        self._buffered = b""  # bytes after a plain request, or its first part
        self._gathering: asyncio.TimerHandle | None = None
        self._is_uvicorn_reading = False
        self._is_leaving = False
        self._stalled: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        # uvicorn keeps the connection until it has read and answered everything that it got.
        if self._is_uvicorn_reading or (self.cycle is not None and not self.cycle.response_complete):
            super().data_received(data)
            return
        if self._buffered:
            data = self._buffered + data
        if self._call is None:
            self._take(data)
        else:
            self._buffer(data)

    def on_message_begin(self) -> None:
        self._is_uvicorn_reading = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._is_uvicorn_reading = False
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stop_awaiting_reader()
        super().resume_writing()

    def _await_reader(self, unread: int) -> None:
        """Close the connection if its client reads nothing for ``send_timeout_s``. This cancels the request."""
        self._stalled = self.loop.call_later(self._fast_path.send_timeout_s, self._close_if_stalled, unread)

    def _close_if_stalled(self, unread: int) -> None:
        if (left := self.transport.get_write_buffer_size()) < unread:
            self._await_reader(left)
        else:
            self.transport.abort()  # ``close`` would wait until the rest is sent

    def _stop_awaiting_reader(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_awaiting_reader()
        self._stop_gathering()
        self._buffered = b""
        if self._call:
            self._call.leave()
            self._call = None
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self._call:
            self._is_leaving = True  # close once the request is answered
            return
        if self._buffered:
            self._leave_buffered_to_uvicorn()
        super().shutdown()

    def respond(self, call: FastHttpCall, status: int, lines: bytes, body: bytes) -> None:
        """Respond to the waiting request, unless the client has gone."""
        # The client has disconnected, so the request was given up.
        if call is not self._call:
            return
        call.leave()
        self._call = None
        self._fast_path.answered += 1
        defaults = self._fast_path.default_lines(self.server_state.default_headers)
        end = b"connection: close\r\n\r\n" if self._is_leaving else b"\r\n"
        self.transport.write(b"".join((STATUS_LINE[status], defaults, lines, end, body)))
        if self._is_leaving:
            self.transport.close()
        # uvicorn counts the request, starts its timer for idle connections, and resumes reading.
        self.on_response_complete()
        if self._buffered:
            self._buffer(self._buffered)
            # Not at once: a pipelining client would keep the loop to itself, and its refused requests would recurse.
            self.loop.call_soon(self._go_on)

    def _take(self, data: bytes) -> None:
        """Decide about bytes that uvicorn has not seen: requests, or a part of one."""
        # Otherwise uvicorn's timer for idle connections would close it while a request waits.
        self._unset_keepalive_if_required()
        self._buffered = b""
        # Without the end of a head, ``find`` returns -1, and ``end`` is too small below.
        end = data.find(b"\r\n\r\n") + 4 if data.startswith(_START) and self._is_free else 0
        head = self._fast_path.head(data[:end]) if end > len(_START) else None
        if head is None or end + head.num_bytes > _MAX_BYTES:
            self._pass_on(data)
        elif len(data) < end + head.num_bytes:
            self._gather(data)
        elif read := self._fast_path.read(head, data[end : end + head.num_bytes]):
            self._stop_gathering()
            self._buffer(data[end + head.num_bytes :])
            prepared, tensors = read
            self._call = FastHttpCall(self, self._fast_path.admission, head, prepared)
            self._call.begin(tensors)
        else:
            self._leave_to_uvicorn(data)

    def _pass_on(self, data: bytes) -> None:
        """Pass a request that is not plain to ``GrpcConnection`` or uvicorn, depending on its first bytes."""
        if not self._is_free or GRPC_START[: len(data)] != data[: len(GRPC_START)]:
            self._leave_to_uvicorn(data)
        elif len(data) < len(GRPC_START):
            self._gather(data)
        else:
            self._hand_over(data)

    def _hand_over(self, data: bytes) -> None:
        """Hand the connection over to ``GrpcConnection``, until it receives something other than a call."""
        self._stop_gathering()
        self.flow.resume_reading()
        self.connections.discard(self)
        protocol = GrpcConnection(self._fast_path.grpc, self.connections, self.timeout_keep_alive, self._take_back)
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
        """Whether the fast path may answer: the client reads its answers, and uvicorn has no prefix for paths."""
        return not self.flow.write_paused and not self.root_path

    def _go_on(self) -> None:
        """Process the bytes that arrived while a request waited."""
        if self._buffered and self._call is None and not self.transport.is_closing():
            self._take(self._buffered)

    def _buffer(self, data: bytes) -> None:
        """Keep bytes after a request. Pause reading if there are many; ``on_response_complete`` resumes it."""
        self._buffered = data
        if len(data) > _MAX_BYTES:
            self.flow.pause_reading()

    def _gather(self, data: bytes) -> None:
        self._buffered = data
        if self._gathering is None:
            # One timer from the first part on, so that parts that trickle in do not extend it.
            self._gathering = self.loop.call_later(_GATHER_S, self._leave_buffered_to_uvicorn)

    def _stop_gathering(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None

    def _leave_buffered_to_uvicorn(self) -> None:
        data, self._buffered = self._buffered, b""
        self._leave_to_uvicorn(data)

    def _leave_to_uvicorn(self, data: bytes) -> None:
        self._stop_gathering()
        # uvicorn has its own pauses, and would wait for the rest of a head.
        self.flow.resume_reading()
        super().data_received(data)


_fast_paths: dict[asyncio.AbstractEventLoop, FastPath] = {}
"""At most one entry: a process is one replica, or none."""


def use_fast_path(fast_path: FastPath) -> None:
    """Use a fast path for the listeners that Serve opens on the running event loop.

    Serve leaves the choice of the protocol to uvicorn, which looks it up by name.
    """
    _fast_paths[asyncio.get_running_loop()] = fast_path
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{create_protocol.__name__}"


def create_protocol(
    config: Config,
    server_state: ServerState,
    app_state: dict[str, Any],
    _loop: asyncio.AbstractEventLoop | None = None,
) -> HttpToolsProtocol:
    """Return the protocol of a new connection: ours if the event loop has a fast path, else uvicorn's."""
    fast_path = _fast_paths.get(asyncio.get_running_loop())
    if fast_path is None:
        return HttpToolsProtocol(config, server_state, app_state, _loop)
    return FastHttpProtocol(fast_path, config, server_state, app_state, _loop)


def _lines(headers: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join([name + b": " + value + b"\r\n" for name, value in headers])
