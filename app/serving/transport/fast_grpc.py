"""Unary gRPC calls on a replica's own HTTP listener, without the gRPC server.

HAProxy translates them from HTTP/2 to HTTP/1.1. A call is a POST with one message. Its answer is chunked with a trailer
section for the status: HAProxy would pass a content length on to gRPC's clients. HAProxy runs one call at a time on a
connection, and closes it if the client gives up.

Inference by one version goes to its batcher without a task. All other calls, and those that are wrong or not plain, are
answered as gRPC's own server does, by ``GrpcMethods``.
https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
https://www.rfc-editor.org/rfc/rfc9112
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, MutableSet, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from urllib.parse import quote

from google.protobuf.message import Message
from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser
from tritonclient.grpc import service_pb2 as pb

from app.errors import (
    DeadlineError,
    OverloadError,
    RequestError,
    RequestTooLargeError,
    UnauthorizedError,
    UnsupportedError,
    short_repr,
)
from app.serving.access import Caller, combine
from app.serving.protocol.compression import MAX_INFLATION, is_compressed
from app.serving.protocol.grpc import require_readable
from app.serving.protocol.infer import LIMITS
from app.serving.reading import ON_LOOP_BYTES
from app.serving.transport.errors import refusal
from app.serving.transport.grpc import INFER, OPEN_METHODS, SERVICE, GrpcMethods, Origin, infer, model_of, parse
from app.serving.transport.inference_call import Admission, TasklessCall
from app.serving.transport.passing import learned
from app.serving.transport.prepared import PreparedMessage, PreparedMessages
from app.tensors import Tensors

START = f"POST /{SERVICE.full_name}/".encode()
"""The first bytes of every call."""
_CONTENT_TYPE = b"application/grpc"
_CONTENT_TYPES = re.compile(rb"application/grpc(\+proto)?\s*(;.*)?", re.IGNORECASE)
_ENCODINGS = ("identity", "gzip", "deflate")
"""Supported compressions of messages."""
_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNIT_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}

_OK = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n" % _CONTENT_TYPE
_EMPTY, _LAST = b"content-length: 0\r\n", b"connection: close\r\n"
_REFUSED = _OK + b"grpc-accept-encoding: %s\r\n" % ",".join(_ENCODINGS).encode()
_NOT_GRPC = b"HTTP/1.1 415 Unsupported Media Type\r\n" + _EMPTY
_INVALID = b"HTTP/1.1 400 Bad Request\r\n" + _EMPTY + _LAST + b"\r\n"
_END = b"\r\n0\r\ngrpc-status: 0\r\n\r\n"
_PREFIX_BYTES = 5
_MAX_HEAD_BYTES = 2**16
"""Limit on a header, and on the bytes between parts of a message. HAProxy passes on at most a quarter of this."""
_RECEIVE_TIMEOUT_S, _SEND_TIMEOUT_S = 30.0, 60.0
"""Time to receive a request, and time for the client to read an answer in addition to the time for its size."""
_MIN_BYTES_PER_S = 2**16
"""Minimum rate at which a client reads an answer, so that it cannot hold the answer forever."""
_CHECK_S = 5.0
"""Interval between checks for an idle or stuck connection."""
_MAX_DETAILS = 2730
"""Limit on an error message in bytes. Percent-encoding may triple it, and HAProxy takes no header above 15 KiB."""
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_MAX_OPEN_BYTES = 4096
"""Limit on a message to a method that needs no token."""
_MAX_OTHER_BYTES = 2**20
"""Limit on a message to a method other than inference. Those methods take only names."""


@dataclass(frozen=True, slots=True)
class _Method:
    """A method of the service."""

    name: str
    request: type[Message]
    answer: Callable[[Any], Awaitable[Message]] | None
    """Answers a message of a caller who was checked. None: the method is inference."""
    is_open: bool
    """Whether everybody may call it."""

    @property
    def is_inference(self) -> bool:
        return self.answer is None

    @property
    def max_bytes(self) -> int:
        """The maximum size of its message, received or decompressed."""
        if self.is_inference:
            return LIMITS.body_bytes
        return _MAX_OPEN_BYTES if self.is_open else _MAX_OTHER_BYTES


class GrpcFastPath:
    """The shared state of a listener's calls."""

    def __init__(self, methods: GrpcMethods, admission: Admission) -> None:
        """Answer with ``methods`` what ``admission`` admits."""
        self.admission = admission
        self.service = methods
        self.answered = 0
        """The number of calls, including refused ones."""
        self.inferred = 0
        """The number of calls that needed no task."""
        self.prepared = PreparedMessages()
        admission.endpoint.on_update(self.prepared.clear)
        self.methods = {
            f"/{SERVICE.full_name}/{method.name}": _Method(
                method.name,
                getattr(pb, method.input_type.name),
                None if method.name == INFER else partial(getattr(GrpcMethods, method.name).answer, methods),
                method.name in OPEN_METHODS,
            )
            for method in SERVICE.methods
            if not method.client_streaming
        }


@dataclass(slots=True)
class GrpcHead:
    """The headers of a call."""

    is_grpc: bool
    """Whether the request is a gRPC call."""
    path: str
    encoding: str
    """The compression of compressed messages."""
    caller: Caller
    timeout_s: float | None
    wrong_timeout: str | None
    """The value of ``grpc-timeout``, if gRPC does not allow it."""
    traceparent: str | None
    """The client's span."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The headers that decide about the answer, as gRPC's metadata."""
        lines = {**self.caller._asdict(), "traceparent": self.traceparent}
        return tuple((name, value) for name, value in lines.items() if value is not None)

    @classmethod
    def read(cls, method: bytes, path: bytes, lines: Sequence[tuple[bytes, bytes]]) -> "GrpcHead":
        """Read the headers of a request. Their names are in lower case."""
        known = combine(lines, b", ")

        def text(name: bytes) -> str | None:
            value = known.get(name)
            return None if value is None else value.decode("latin-1")

        content_type, timeout = known.get(b"content-type", b""), text(b"grpc-timeout")
        # gRPC allows at most 8 digits and a unit. Anything else is kept, for the error message.
        parts = _TIMEOUT.fullmatch(timeout) if timeout is not None else None
        return cls(
            method == b"POST" and (content_type == _CONTENT_TYPE or bool(_CONTENT_TYPES.fullmatch(content_type))),
            path.decode("latin-1"),
            text(b"grpc-encoding") or "identity",
            Caller(text(b"authorization"), text(b"host"), text(b"origin")),
            int(parts[1]) * _UNIT_S[parts[2]] if parts else None,
            timeout if parts is None else None,
            text(b"traceparent"),
        )


class GrpcCall(TasklessCall):
    """A call, from its headers until its answer is sent. ``GrpcConnection`` passes the body to it."""

    __slots__ = (
        "_connection", "_data", "_deadline", "_fast_path", "_id", "_is_over", "_method", "_prepared", "_task", "head",
    )  # fmt: skip

    def __init__(self, fast_path: GrpcFastPath, connection: "GrpcConnection", head: GrpcHead) -> None:
        self._method = fast_path.methods.get(head.path)
        super().__init__(fast_path.admission, "grpc" if self._method and self._method.is_inference else None)
        fast_path.answered += 1
        self.head = head
        self._fast_path = fast_path
        self._connection = connection
        self._data: bytes | bytearray = b""
        self._is_over = False
        self._prepared: PreparedMessage | None = None
        self._id: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Refuse an unauthorized call, or one with an unknown method or compression or an invalid timeout."""
        head, method = self.head, self._method
        if not head.is_grpc:
            self.count(RequestError("the content type is not that of gRPC").of("content_type.unsupported"))
            self._connection.refuse_http(self)
            return
        try:
            if method is None:
                raise UnsupportedError(f"{short_repr(head.path)} is not a unary method of {SERVICE.full_name}").of(
                    "method.unknown"
                )
            if head.encoding not in _ENCODINGS:
                expected = ", ".join(_ENCODINGS)
                raise UnsupportedError(f"grpc-encoding is {short_repr(head.encoding)}: expected {expected}").of(
                    "encoding.unsupported", "grpc-encoding"
                )
            if not method.is_open:
                self.admission.require_access(head.caller, self._connection.peer)
            if head.wrong_timeout is not None:
                raise RequestError(f"grpc-timeout is {short_repr(head.wrong_timeout)}: expected, for example, 10S").of(
                    "timeout.invalid", "grpc-timeout"
                )
        except (UnauthorizedError, RequestError) as error:
            self.refuse(error)
            return
        if method.is_inference:
            self.begin_trace(head.traceparent)
        self.await_body(lambda: self.refuse(self.too_slow()))
        if head.timeout_s is not None:
            self._deadline = asyncio.get_running_loop().call_later(head.timeout_s, self._expire_deadline)

    def receive(self, data: bytes) -> None:
        """Take a part of the message. Refuse a message that is too large before it has arrived."""
        if self._is_over or self._method is None:
            return
        try:
            # Most messages arrive in one part, which is kept without a copy.
            self.hold(len(self._data) + len(data))
            if isinstance(self._data, bytearray):
                self._data += data
            else:
                self._data = bytearray(self._data + data) if self._data else data
            size = int.from_bytes(self._data[1:_PREFIX_BYTES], "big")
            if len(self._data) >= _PREFIX_BYTES and size > self._method.max_bytes:
                raise RequestTooLargeError(f"a message of {size} bytes: at most {self._method.max_bytes}")
            if len(self._data) > _PREFIX_BYTES + size:
                raise RequestError(f"the call continues after a message of {size} bytes: send one message").of(
                    "message.repeated"
                )
        except (OverloadError, RequestError) as error:
            self.refuse(error)

    def finish(self) -> None:
        """Answer the call."""
        if self._is_over or self._method is None:
            return
        self.arrived()
        try:
            is_compressed, message = self._message()
            if self._method.is_inference:
                self.enter()
            if is_compressed:
                # Reserve for the worst case, because the decompressed size is known only after the memory is used.
                self.hold(max(self._held, min(MAX_INFLATION * len(message), self._method.max_bytes)))
                self._task = asyncio.get_running_loop().create_task(self._inflate(self._method, message))
            else:
                self._proceed(self._method, message)
        except (OverloadError, RequestError) as error:
            self.refuse(error)

    def expire(self) -> None:
        """Refuse the call. The rest of its message did not arrive in time."""
        self.refuse(TimeoutError("the message did not arrive in time: send it faster"))

    def leave(self) -> None:
        """Free the call's slot and room, and stop waiting."""
        self._is_over = True
        self._stop()
        super().leave()

    def send_answer(self, outputs: Tensors) -> None:
        assert self._prepared is not None
        self._respond(self._prepared.write(outputs, self._id))

    def send_error(self, error: Exception) -> None:
        reply = refusal(error)
        message = quote(reply.message.encode()[:_MAX_DETAILS], _PRINTABLE)
        status = [("grpc-status", str(reply.grpc.value[0])), ("grpc-message", message)]
        self._connection.refuse(self, [*status, *reply.trailers])

    def _message(self) -> tuple[bool, bytes]:
        """Return whether the call's message is compressed, and its bytes.

        Raises:
            RequestError: the call does not have exactly one whole message, or does not say how it is compressed.
        """
        prefix, message = self._data[:_PREFIX_BYTES], bytes(memoryview(self._data)[_PREFIX_BYTES:])
        self._data = b""
        size, self.received = int.from_bytes(prefix[1:], "big"), len(message)
        if len(prefix) < _PREFIX_BYTES or len(message) != size:
            raise RequestError(f"the call has {len(message)} of {size} bytes of a message: send one whole message").of(
                "message.cut_short"
            )
        if prefix[0] > 1:
            raise RequestError(
                f"the message begins with the byte {prefix[0]}: expected 0, or 1 if it is compressed"
            ).of("message.prefix")
        if prefix[0] and not is_compressed(self.head.encoding):
            raise RequestError("the message is compressed, but grpc-encoding does not say how").of(
                "encoding.missing", "grpc-encoding"
            )
        return bool(prefix[0]), message

    async def _inflate(self, method: _Method, message: bytes) -> None:
        """Decompress the message outside the event loop, and proceed with its content."""
        try:
            reader = self.admission.endpoint.reader
            content = await reader.inflate(message, self.head.encoding, method.max_bytes)
            self.hold(len(content))
            self._proceed(method, content)
        except Exception as error:
            self.refuse(error)

    def _proceed(self, method: _Method, content: bytes) -> None:
        """Submit the call, or run it in a task.

        Raises:
            OverloadError: its queue is full.
            RequestError: the message would take too long to read.
        """
        num_bytes = require_readable(content)
        if not (method.is_inference and num_bytes <= ON_LOOP_BYTES and self._submit(content)):
            self._task = asyncio.get_running_loop().create_task(self._run(method, content, num_bytes))

    def _submit(self, content: bytes) -> bool:
        """Submit a ModelInferRequest if a single version answers it. Return False if not, or on an error.

        Raises:
            OverloadError: its queue is full.
        """
        try:
            message = pb.ModelInferRequest.FromString(content)
            served = self.admission.endpoint.route_single(message.model_name, message.model_version or None)
            if served is None:
                return False
            # Note the id first: ``read`` may remove it from the message.
            self._id = message.id or None
            self._prepared, tensors = self._fast_path.prepared.read(served, message, len(content))
        except Exception:  # ``_run`` meets the same error and reports it
            return False
        self.submit(self._prepared.prepared, tensors)
        self._fast_path.inferred += 1
        return True

    async def _run(self, method: _Method, content: bytes, num_bytes: int) -> None:
        try:
            reader = self.admission.endpoint.reader
            message = await reader.read(num_bytes, lambda: parse(method.request, content), self.received)

            def here() -> Awaitable[Message]:
                return method.answer(message) if method.answer else infer(self, message, len(content))

            service, origin = self._fast_path.service, Origin(self.head.metadata, self._connection.peer)
            if service.passes_on(message):
                self.leave_count_to(model_of(message))
            answer, pool = await service.answer_or_pass_on(method.name, message, origin, here)
            self._respond(answer.SerializeToString(), learned(model_of(message), pool) if pool else [])
        except Exception as error:
            self.refuse(error)

    def _expire_deadline(self) -> None:
        self.refuse(DeadlineError("the call's grpc-timeout has passed"))

    def _respond(self, content: bytes, lines: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Send an answer, with more headers. Raises OverloadError if there is no room for it until it is sent."""
        if not self._is_over:
            self._stop()
            # The answer takes the room of the request, which was dropped.
            self.hold(len(content))
            self.sent = len(content)
            self.count()
            self._connection.respond(self, content, lines)

    def _stop(self) -> None:
        """Stop waiting, and drop the request."""
        if self._deadline:
            self._deadline.cancel()
        # The task itself may be sending the answer.
        if self._task and self._task is not asyncio.current_task():
            self._task.cancel()
        self._task = self._deadline = None
        self._data = b""


class GrpcConnection(asyncio.Protocol):
    """A connection during consecutive gRPC calls. uvicorn calls its ``shutdown``."""

    def __init__(
        self,
        fast_path: GrpcFastPath,
        connections: MutableSet[Any],
        keep_alive_s: float,
        give_back: Callable[[bytes], None],
    ) -> None:
        """Answer calls.

        Args:
            connections: the listener's open connections, to which this one is added.
            keep_alive_s: a connection is closed after this time without a request.
            give_back: takes the connection over, with the first bytes of a request that is not a call.
        """
        self._fast_path = fast_path
        self._give_back = give_back
        self._connections = connections
        self._keep_alive_s = keep_alive_s
        self._parser: HttpRequestParser | None = HttpRequestParser(self)
        self._path, self._lines = b"", list[tuple[bytes, bytes]]()
        # Two states, because a call may have its answer before its message is complete.
        self._call: GrpcCall | None = None  # until its answer is sent
        self._reading: GrpcCall | None = None  # the same, until its message is complete
        self._is_whole = True  # whether no request is incomplete
        self._is_sending = self._is_leaving = False
        self._unread = 0  # bytes received since the last progress
        # The time of the last change of state, and the limit for sending the answer.
        self._since_s, self._send_s = time.monotonic(), 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.peer = ""
        """The client's address, as gRPC writes it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's class does not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self.peer = _peer_of(transport.get_extra_info("peername"))
        self._connections.add(self)
        self._check()

    def connection_lost(self, _: Exception | None) -> None:
        if self._timer:
            self._timer.cancel()
        self._connections.discard(self)
        self._forget()
        self._parser = self._timer = None  # the parser refers back to this object

    def pause_writing(self) -> None:
        self._is_sending = True

    def resume_writing(self) -> None:
        self._is_sending = False
        self._finish()

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._transport.is_closing():
            return
        if self._is_whole and self._call is None and not data.startswith(START):
            self.connection_lost(None)
            self._give_back(data)
            return
        self._unread += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserCallbackError:
            raise  # a bug in our callbacks, not a client's error
        except (HttpParserError, HttpParserUpgrade):
            self._fail()
        else:
            if self._unread > _MAX_HEAD_BYTES:
                self._fail()

    def shutdown(self) -> None:
        """Close the connection, after the answer to a request that has begun."""
        self._is_leaving = True
        if self._call is None and self._is_whole:
            self._transport.close()

    def on_message_begin(self) -> None:
        self._path, self._lines = b"", []
        self._is_whole = False
        # While an answer is sent, the time is that of the answer.
        if self._call is None:
            self._since_s = time.monotonic()

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._lines.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._unread = 0
        if not self._parser.should_keep_alive():
            self._is_leaving = True
        if self._call is not None:  # a pipelined request, which HAProxy never sends
            self._is_leaving = True
            return
        if self._transport.is_closing():
            return
        head = GrpcHead.read(self._parser.get_method(), self._path, self._lines)
        self._lines = []
        self._call = self._reading = call = GrpcCall(self._fast_path, self, head)
        call.begin()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        if self._reading is not None:
            self._reading.receive(body)

    def on_message_complete(self) -> None:
        self._unread = 0
        self._lines = []
        self._is_whole = True
        call, self._reading = self._reading, None
        if call is not None:
            call.finish()

    def respond(self, call: GrpcCall, content: bytes, lines: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Send a message as the answer to a call, unless it has one, with these headers."""
        size = len(content)
        chunk = b"\r\n%x\r\n\0" % (size + _PREFIX_BYTES)
        more = b"".join(b"%s: %s\r\n" % line for line in lines)
        self._send(call, (_OK, more, self._farewell, chunk, size.to_bytes(4, "big"), content, _END))

    def refuse(self, call: GrpcCall, trailers: list[tuple[str, str]]) -> None:
        """Answer a call with an error, unless it has an answer."""
        lines = "".join([f"{name}: {value}\r\n" for name, value in trailers]).encode("latin-1")
        # gRPC has its status in the trailers, so HTTP's status is 200 for errors, too.
        self._send(call, (_REFUSED, self._farewell, b"\r\n0\r\n", lines, b"\r\n"))

    def refuse_http(self, call: GrpcCall) -> None:
        """Answer a request that is not a gRPC call."""
        self._send(call, (_NOT_GRPC, self._farewell, b"\r\n"))

    @property
    def _farewell(self) -> bytes:
        return _LAST if self._is_leaving else b""

    def _send(self, call: GrpcCall, parts: tuple[bytes, ...]) -> None:
        # The answer may come too late: the client has gone, or the call was refused meanwhile.
        if call is not self._call or self._is_sending or self._transport.is_closing():
            return
        answer = b"".join(parts)
        self._transport.write(answer)
        # ``write`` has called ``pause_writing``, because the client reads slowly. The call ends once it has read.
        if self._is_sending:
            self._reading = None
            self._since_s = time.monotonic()
            self._send_s = _SEND_TIMEOUT_S + len(answer) / _MIN_BYTES_PER_S
        else:
            self._finish()

    def _finish(self) -> None:
        """Be ready for the next call."""
        self._forget()
        self._since_s = time.monotonic()
        if self._is_leaving:
            self._transport.close()

    def _forget(self) -> None:
        call, self._call, self._reading = self._call, None, None
        if call is not None:
            call.leave()

    def _fail(self) -> None:
        """Close the connection of a client that does not speak HTTP/1.1."""
        # An error must not stand in the middle of an answer.
        if not self._is_sending:
            self._transport.write(_INVALID)
        self._is_leaving = True
        if not self._is_sending:
            self._finish()

    def _check(self) -> None:
        """Refuse a late request, and close the connection if it is idle or stuck."""
        waited_s = time.monotonic() - self._since_s
        if self._is_sending:
            if waited_s > self._send_s:
                self._transport.abort()
        elif not self._is_whole and waited_s > _RECEIVE_TIMEOUT_S:
            if self._reading is not None:
                self._reading.expire()
            elif self._call is None:
                self._transport.abort()
        elif self._is_whole and self._call is None and waited_s >= self._keep_alive_s:
            # ``close`` would wait for data that the client has not read.
            self._transport.abort()
        self._timer = asyncio.get_running_loop().call_later(min(_CHECK_S, self._keep_alive_s), self._check)


def _peer_of(address: object) -> str:
    """Return a client's address as gRPC writes it."""
    if not isinstance(address, tuple):
        return "unix:"
    host, port = address[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
