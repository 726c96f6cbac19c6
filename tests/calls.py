"""gRPC calls: through a real client, and as bytes of HTTP/1.1 on a socket, as HAProxy sends them."""

import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
from httptools import HttpResponseParser

SERVICE = "/inference.GRPCInferenceService/"
_PATIENCE_S = 20.0


@dataclass(frozen=True)
class Outcome:
    """What a client of gRPC gets."""

    code: str
    details: str
    content: bytes = b""
    trailing: dict[str, str | bytes] = field(default_factory=dict)


def ask(
    address: str,
    content: bytes,
    method: str = "ModelInfer",
    metadata: Sequence[tuple[str, str | bytes]] = (),
    compression: grpc.Compression | None = None,
    timeout_s: float | None = None,
) -> Outcome:
    """Send a message with a new client."""
    path = method if method.startswith("/") else SERVICE + method
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        call = channel.unary_unary(path).with_call
        try:
            answer, done = call(content, metadata=metadata, compression=compression, timeout=timeout_s)
        except grpc.RpcError as error:
            return Outcome(error.code().name, error.details(), trailing=dict(error.trailing_metadata()))
        return Outcome(done.code().name, done.details(), answer, dict(done.trailing_metadata()))


def prefixed(message: bytes, is_compressed: bool = False) -> bytes:
    """Return a message as gRPC sends it."""
    return struct.pack(">BI", is_compressed, len(message)) + message


def head(*lines: str, method: str = "ModelInfer", content_type: str = "application/grpc") -> bytes:
    """Return the header of a call. ``lines`` tell the length of its body."""
    named = [f"POST {SERVICE}{method} HTTP/1.1", "host: x", f"content-type: {content_type}", "te: trailers", *lines]
    return "\r\n".join([*named, "", ""]).encode("latin-1")


def chunks(content: bytes, size: int = 2**14, end: bool = True) -> bytes:
    """Return content in chunks of a size."""
    parts = [content[at : at + size] for at in range(0, len(content), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + (b"0\r\n\r\n" if end else b"")


CHUNKED = "transfer-encoding: chunked"


def call(message: bytes, *lines: str, method: str = "ModelInfer", content_type: str = "application/grpc") -> bytes:
    """Return a whole call."""
    return sized(prefixed(message), *lines, method=method, content_type=content_type)


def sized(content: bytes, *lines: str, method: str = "ModelInfer", content_type: str = "application/grpc") -> bytes:
    """Return a request with this body."""
    return head(*lines, f"content-length: {len(content)}", method=method, content_type=content_type) + content


@dataclass
class Answer:
    """What a server says to a request."""

    http: int = 0
    lines: dict[str, str] = field(default_factory=dict)
    """Headers and trailers."""
    content: bytes = b""
    is_whole: bool = False

    @property
    def status(self) -> str | None:
        return self.lines.get("grpc-status")


class Line:
    """A connection to a server."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), _PATIENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.answers: list[Answer] = []
        self.is_closed = False
        self._parser = HttpResponseParser(self)

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *parts: bytes, pause_s: float = 0.0) -> None:
        """Send the parts, until the server has closed."""
        for part in parts:
            try:
                self.socket.sendall(part)
            except OSError:
                return
            time.sleep(pause_s)

    def read(self, count: int | None = None) -> list[Answer]:
        """Read until there are so many answers, or until the server has closed. Raises TimeoutError."""
        while not self.is_closed and (count is None or sum(answer.is_whole for answer in self.answers) < count):
            try:
                part = self.socket.recv(2**16)
            except ConnectionError:
                part = b""
            self.is_closed = not part
            self._parser.feed_data(part)
        return self.answers

    def on_message_begin(self) -> None:
        self.answers.append(Answer())

    def on_header(self, name: bytes, value: bytes) -> None:
        self.answers[-1].lines[name.decode()] = value.decode()

    def on_headers_complete(self) -> None:
        self.answers[-1].http = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.answers[-1].content += body

    def on_message_complete(self) -> None:
        self.answers[-1].is_whole = True


def exchange(address: str, *parts: bytes, count: int | None = 1, pause_s: float = 0.0) -> list[Answer]:
    """Send the parts over one connection, and return so many answers."""
    with Line(address) as line:
        line.send(*parts, pause_s=pause_s)
        return line.read(count)
