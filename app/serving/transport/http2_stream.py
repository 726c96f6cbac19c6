"""HTTP/2 streams, and how their answers are sent: https://www.rfc-editor.org/rfc/rfc9113"""

import struct
import time
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Protocol

from hpack import Encoder, NeverIndexedHeaderTuple
from hyperframe.frame import DataFrame, Frame, HeadersFrame, RstStreamFrame

FIRST_WINDOW, LARGEST_WINDOW = 2**16 - 1, 2**31 - 1
FIRST_MAX_FRAME, LARGEST_MAX_FRAME = 2**14, 2**24 - 1
_MAX_IN_A_FRAME = 2**16
"""Even if the client takes larger frames: answers take turns."""
_MIN_BYTES_PER_S = 2**16
"""Of an answer. A client that reads it in small parts cannot hold it forever."""
_FRAME_HEAD = struct.Struct(">HBBBL")
_END_STREAM, _END_HEADERS = 1, 4
_ENCODER = Encoder()


class Code(IntEnum):
    """Why a stream or a connection ends: https://www.rfc-editor.org/rfc/rfc9113#section-7"""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class ProtocolError(Exception):
    """A client error after which the connection cannot go on."""

    def __init__(self, code: Code, told: str) -> None:
        super().__init__(told)
        self.code = code


class Call(Protocol):
    """The receiver of a request's body."""

    def begin(self) -> None:
        """Refuse the request at once if its header is wrong. Its body is then ignored."""

    def receive(self, data: bytes) -> None:
        """Take a part of the body."""

    def finish(self) -> None:
        """Answer the request. Its body is complete."""

    def expire(self) -> None:
        """Refuse the request. The rest of its body did not arrive in time."""

    def end(self) -> None:
        """Release everything. The answer has been sent, or nobody waits for it any more."""


class Answers(Protocol):
    """The sender of a connection's answers."""

    def respond(self, stream: "Stream", head: bytes, body: bytes, trailers: bytes) -> None:
        """Send a header, a body and trailers."""

    def refuse(self, stream: "Stream", trailers: bytes) -> None:
        """Send an answer that is only a header."""

    def reset(self, stream: "Stream", code: Code) -> None:
        """End the stream without an answer."""


class Stream:
    """A request and its answer."""

    __slots__ = ("_answers", "call", "id", "is_whole", "moved_s", "peer", "received", "rest", "trailers", "window")

    def __init__(self, answers: Answers, stream_id: int, window: int, peer: str) -> None:
        self._answers = answers
        self.id = stream_id
        self.window = window
        """Bytes of the answer that the client takes now; below 0 after it has reduced its window."""
        self.peer = peer
        """The client's address, as gRPC writes it."""
        self.call: Call | None = None
        """None once the answer has been sent, or nobody waits for it."""
        self.is_whole = False
        """Whether the client has sent the whole request."""
        self.received = 0
        """Bytes received since the client's window was last widened."""
        self.moved_s = time.monotonic()
        """When the stream was opened; later, when its answer began. Each part that is sent moves this time forward."""
        self.rest: memoryview | None = None
        """The part of the answer that is not sent yet; None before the answer."""
        self.trailers = b""

    def respond(self, head: bytes, body: bytes, trailers: bytes) -> None:
        """Send an answer unless the stream has ended. Its headers come from ``header_block``."""
        if self.call is not None and self.rest is None:
            self._answers.respond(self, head, body, trailers)

    def refuse(self, trailers: bytes) -> None:
        """Send an answer that is only a header, unless the stream has ended."""
        if self.call is not None and self.rest is None:
            self._answers.refuse(self, trailers)

    def reset(self, code: Code) -> None:
        """End the stream without an answer, unless it has ended."""
        if self.call is not None:
            self._answers.reset(self, code)


def header_block(*headers: tuple[str, str]) -> bytes:
    """Encode headers independently of the state of any connection."""
    return bytes(_ENCODER.encode([NeverIndexedHeaderTuple(*header) for header in headers], huffman=False))


def peer_of(address: object) -> str:
    """Return a client's address as gRPC writes it."""
    if not isinstance(address, tuple):
        return "unix:"
    host, port = address[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


class Sender:
    """Sends the answers of a connection as fast as its client takes them. Large answers take turns."""

    def __init__(self, write: Callable[[bytes], None], ended: Callable[[Stream], None]) -> None:
        """Write frames with ``write``. Call ``ended`` with each stream whose answer has been written."""
        self._write = write
        self._ended = ended
        self._waiting: dict[int, Stream] = {}
        self._window = FIRST_WINDOW
        self.first_window = FIRST_WINDOW
        """The window of a new stream."""
        self.max_frame = FIRST_MAX_FRAME
        self.is_paused = False
        """Whether the transport's buffer is full."""

    def respond(self, stream: Stream, head: bytes, body: bytes, trailers: bytes) -> None:
        """Send an answer, at once if there is room."""
        begin = _frame(HeadersFrame, _END_HEADERS, stream.id, head)
        if len(body) <= min(self._window, stream.window, self.max_frame) and not (self._waiting or self.is_paused):
            self._window -= len(body)
            self._write(b"".join((begin, _frame(DataFrame, 0, stream.id, body), _last(stream, trailers))))
            self._ended(stream)
            return
        self._write(begin)
        stream.rest, stream.trailers, stream.moved_s = memoryview(body), trailers, time.monotonic()
        self._waiting[stream.id] = stream
        self.flush()

    def refuse(self, stream: Stream, trailers: bytes) -> None:
        """Send an answer that is only a header."""
        self._write(_last(stream, trailers))
        self._ended(stream)

    def forget(self, stream: Stream) -> None:
        """Stop sending an answer."""
        self._waiting.pop(stream.id, None)

    def flush(self) -> None:
        """Send as much as there is room for, one frame of each answer at a time."""
        while not self.is_paused and self._window > 0:
            ready = [stream for stream in self._waiting.values() if stream.window > 0 or not stream.rest]
            if not ready:
                return
            for stream in ready:
                self._send_part(stream)

    def _send_part(self, stream: Stream) -> None:
        assert stream.rest is not None
        size = min(len(stream.rest), stream.window, self._window, self.max_frame, _MAX_IN_A_FRAME)
        if size > 0:
            self._window -= size
            stream.window -= size
            stream.moved_s = min(time.monotonic(), stream.moved_s + size / _MIN_BYTES_PER_S)
            part, stream.rest = stream.rest[:size], stream.rest[size:]
            self._write(_frame(DataFrame, 0, stream.id, part))
        if not stream.rest:
            self._write(_last(stream, stream.trailers))
            self._ended(stream)

    def widen(self, stream: Stream | None, size: int) -> None:
        """Widen the window of a stream; None: of the connection. Raises ProtocolError if it gets too large."""
        if stream:
            stream.window = _widened(stream.window, size)
        else:
            self._window = _widened(self._window, size)
        self.flush()

    def set_first_window(self, size: int, streams: Iterable[Stream]) -> None:
        """Set the first window of new streams, and adjust open ones. Raises ProtocolError if one gets too large."""
        change, self.first_window = size - self.first_window, _widened(0, size)
        for stream in streams:
            stream.window = _widened(stream.window, change)
        self.flush()

    def set_max_frame(self, size: int) -> None:
        """Set the maximum size of a frame. Raises ProtocolError if the standard does not allow it."""
        if not FIRST_MAX_FRAME <= size <= LARGEST_MAX_FRAME:
            raise ProtocolError(Code.PROTOCOL_ERROR, f"frames of {size} bytes: expected 2^14 to 2^24-1")
        self.max_frame = size


def _widened(window: int, size: int) -> int:
    if window + size > LARGEST_WINDOW:
        raise ProtocolError(Code.FLOW_CONTROL_ERROR, "a window of more than 2^31-1 bytes")
    return window + size


def _frame(kind: type[Frame], flags: int, stream_id: int, content: bytes | memoryview) -> bytes:
    """Return a frame as hyperframe writes it. hyperframe takes ten times as long, and each call sends three frames."""
    size = len(content)
    return b"".join((_FRAME_HEAD.pack(size >> 8, size & 0xFF, kind.type, flags, stream_id), content))


def _last(stream: Stream, trailers: bytes) -> bytes:
    """Return the last frames of a stream. The client need not send the rest of its request."""
    last = _frame(HeadersFrame, _END_HEADERS | _END_STREAM, stream.id, trailers)
    return last if stream.is_whole else last + RstStreamFrame(stream.id, Code.NO_ERROR).serialize()
