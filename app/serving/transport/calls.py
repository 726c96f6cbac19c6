"""Unary gRPC calls over HTTP/1.1, as HAProxy translates them from HTTP/2.

A call is a POST with one message. Its answer is chunked with a trailer section for the status: HAProxy would pass a
content length on to gRPC's clients. HAProxy runs one call at a time on a connection, and closes it if the client gives
up.
https://www.rfc-editor.org/rfc/rfc9112
"""

import asyncio
import time
from collections.abc import Callable, MutableSet
from typing import Any, cast

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser

from app.serving.transport.call_head import CONTENT_TYPE, ENCODINGS, CallHead
from app.serving.transport.grpc import SERVICE
from app.serving.transport.unary import UnaryCall, UnaryService

START = f"POST /{SERVICE.full_name}/".encode()
"""The first bytes of every call."""
_OK = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n" % CONTENT_TYPE.encode()
_EMPTY, _LAST = b"content-length: 0\r\n", b"connection: close\r\n"
_REFUSED = _OK + b"grpc-accept-encoding: %s\r\n" % ",".join(ENCODINGS).encode()
_NOT_GRPC = b"HTTP/1.1 415 Unsupported Media Type\r\n" + _EMPTY
_INVALID = b"HTTP/1.1 400 Bad Request\r\n" + _EMPTY + _LAST + b"\r\n"
_PREFIX_BYTES = 5
_END = b"\r\n0\r\ngrpc-status: 0\r\n\r\n"
_MAX_HEAD_BYTES = 2**16
"""Limit on a header, and on the bytes between parts of a message. HAProxy passes on at most a quarter of this."""
_RECEIVE_TIMEOUT_S, _SEND_TIMEOUT_S = 30.0, 60.0
"""Time to receive a request, and time for the client to read an answer in addition to the time for its size."""
_MIN_BYTES_PER_S = 2**16
"""Minimum rate at which a client reads an answer, so that it cannot hold the answer forever."""
_CHECK_S = 5.0
"""Interval between checks for an idle or stuck connection."""


class CallConnection(asyncio.Protocol):
    """A connection during consecutive gRPC calls. uvicorn calls its ``shutdown``."""

    def __init__(
        self,
        service: UnaryService,
        connections: MutableSet[Any],
        keep_alive_s: float,
        give_back: Callable[[bytes], None],
    ) -> None:
        """Answer calls with ``service``.

        Args:
            connections: the listener's open connections, to which this one is added.
            keep_alive_s: a connection is closed after this time without a request.
            give_back: takes the connection over, with the first bytes of a request that is not a call.
        """
        self._service = service
        self._give_back = give_back
        self._connections = connections
        self._keep_alive_s = keep_alive_s
        self._parser: HttpRequestParser | None = HttpRequestParser(self)
        self._path, self._lines = b"", list[tuple[bytes, bytes]]()
        # Two states, because a call may have its answer before its message is complete.
        self._call: UnaryCall | None = None  # until its answer is sent
        self._reading: UnaryCall | None = None  # the same, until its message is complete
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
        head = CallHead.read(self._parser.get_method(), self._path, self._lines)
        self._lines = []
        self._call = self._reading = call = self._service.begin(self, head)
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

    def respond(self, call: UnaryCall, content: bytes) -> None:
        """Send a message as the answer to a call, unless it has one."""
        size = len(content)
        chunk = b"\r\n%x\r\n\0" % (size + _PREFIX_BYTES)
        self._send(call, (_OK, self._farewell, chunk, size.to_bytes(4, "big"), content, _END))

    def refuse(self, call: UnaryCall, trailers: list[tuple[str, str]]) -> None:
        """Answer a call with an error, unless it has an answer."""
        lines = "".join([f"{name}: {value}\r\n" for name, value in trailers]).encode("latin-1")
        # gRPC has its status in the trailers, so HTTP's status is 200 for errors, too.
        self._send(call, (_REFUSED, self._farewell, b"\r\n0\r\n", lines, b"\r\n"))

    def refuse_http(self, call: UnaryCall) -> None:
        """Answer a request that is not a gRPC call."""
        self._send(call, (_NOT_GRPC, self._farewell, b"\r\n"))

    @property
    def _farewell(self) -> bytes:
        return _LAST if self._is_leaving else b""

    def _send(self, call: UnaryCall, parts: tuple[bytes, ...]) -> None:
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
            call.end()

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
