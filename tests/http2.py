"""HTTP/2 as frames on a socket, valid or invalid."""

import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpack import Decoder, Encoder
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, PingFrame, RstStreamFrame, SettingsFrame

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HELLO = PREFACE + SettingsFrame().serialize()
SERVICE = "/inference.GRPCInferenceService/"
_PATIENCE_S = 20.0


@dataclass
class Said:
    """What a server sent on one connection."""

    headers: dict[int, dict[str, str]] = field(default_factory=dict)
    """Headers and trailers, by stream."""
    data: dict[int, bytes] = field(default_factory=dict)
    resets: dict[int, int] = field(default_factory=dict)
    goaways: list[int] = field(default_factory=list)
    """Their error codes."""
    frames: list[Frame] = field(default_factory=list)
    is_closed: bool = False

    def status(self, stream: int) -> str | None:
        return self.headers.get(stream, {}).get("grpc-status")

    @property
    def told(self) -> dict[int, tuple[str | None, bytes]]:
        """The status and the message of each stream that was answered."""
        return {number: (self.status(number), self.data.get(number, b"")) for number in self.headers}


def prefixed(message: bytes, is_compressed: bool = False) -> bytes:
    """Return a message as gRPC sends it."""
    return struct.pack(">BI", is_compressed, len(message)) + message


def head(stream: int, *lines: tuple[str, str], method: str = "ModelInfer", end: bool = False, **other: str) -> bytes:
    """Return the headers of a call. ``other`` replaces or adds some."""
    named = {":method": "POST", ":scheme": "http", ":path": SERVICE + method, ":authority": "x", "te": "trailers"}
    named |= {"content-type": "application/grpc"} | {name.replace("_", "-"): value for name, value in other.items()}
    block = Encoder().encode([*named.items(), *lines])
    flags = ["END_HEADERS", "END_STREAM"] if end else ["END_HEADERS"]
    return HeadersFrame(stream, block, flags=flags).serialize()


def data(stream: int, content: bytes, end: bool = True, size: int = 2**14) -> bytes:
    """Return content in as many frames as it takes."""
    parts = [content[at : at + size] for at in range(0, len(content), size)] or [b""]
    frames = [DataFrame(stream, part) for part in parts]
    if end:
        frames[-1].flags.add("END_STREAM")
    return b"".join(frame.serialize() for frame in frames)


def call(stream: int, message: bytes, *lines: tuple[str, str], method: str = "ModelInfer", **other: str) -> bytes:
    """Return a whole call."""
    return head(stream, *lines, method=method, **other) + data(stream, prefixed(message))


class Talk:
    """A connection to a server."""

    def __init__(self, address: str, answers: bool = True) -> None:
        """Connect. Without ``answers``, never acknowledge the server's settings and pings, even after it has closed."""
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), _PATIENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.said = Said()
        self._kept, self._decoder, self._answers = b"", Decoder(), answers

    def __enter__(self) -> "Talk":
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

    def read_until(self, streams: Sequence[int] = (), kind: type[Frame] | None = None) -> Said:
        """Read until these streams have ended, a frame of this kind has come, or the server has closed.

        Raises:
            TimeoutError: none of this happens in time.
        """
        while not self.said.is_closed:
            if streams and all(self._has_ended(stream) for stream in streams):
                break
            if kind and any(isinstance(frame, kind) for frame in self.said.frames):
                break
            self.read_some()
        return self.said

    def read_some(self) -> None:
        """Read what comes next."""
        try:
            part = self.socket.recv(2**16)
        except ConnectionError:
            part = b""
        self.said.is_closed = not part
        self._kept += part
        self._take_frames()

    def _has_ended(self, stream: int) -> bool:
        return (
            stream in self.said.resets
            or self.said.status(stream) is not None
            or (self.said.headers.get(stream, {}).get(":status", "200") != "200")
        )

    def _take_frames(self) -> None:
        while len(self._kept) >= 9:
            frame, size = Frame.parse_frame_header(memoryview(self._kept[:9]))
            if len(self._kept) < 9 + size:
                return
            frame.parse_body(memoryview(self._kept[9 : 9 + size]))
            self._kept = self._kept[9 + size :]
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        self.said.frames.append(frame)
        match frame:
            case HeadersFrame():
                headers = {str(name): str(value) for name, value in self._decoder.decode(frame.data)}
                self.said.headers.setdefault(frame.stream_id, {}).update(headers)
            case DataFrame():
                self.said.data[frame.stream_id] = self.said.data.get(frame.stream_id, b"") + frame.data
            case RstStreamFrame():
                self.said.resets[frame.stream_id] = frame.error_code
            case GoAwayFrame():
                self.said.goaways.append(frame.error_code)
            case SettingsFrame() if self._answers and "ACK" not in frame.flags:
                self.send(SettingsFrame(flags=["ACK"]).serialize())
            case PingFrame() if self._answers and "ACK" not in frame.flags:
                self.send(PingFrame(opaque_data=frame.opaque_data, flags=["ACK"]).serialize())
            case _:
                pass
