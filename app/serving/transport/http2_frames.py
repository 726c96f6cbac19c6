"""Frames that an HTTP/2 client sends, and the first that it gets: https://www.rfc-editor.org/rfc/rfc9113#section-4"""

import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    HeadersFrame,
    PushPromiseFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from app.serving.transport.call_head import MAX_HEADER_BYTES
from app.serving.transport.http2_stream import FIRST_MAX_FRAME, FIRST_WINDOW, Code, ProtocolError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_STREAMS = 256
STREAM_WINDOW, TOTAL_WINDOW = 2**20, 2**24
"""Bytes that the client may have on their way: of a stream, and of all streams of a connection."""
HELLO = (
    SettingsFrame(
        settings={
            SettingsFrame.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
            SettingsFrame.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            SettingsFrame.MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES,
        }
    ).serialize()
    + WindowUpdateFrame(0, window_increment=TOTAL_WINDOW - FIRST_WINDOW).serialize()
)
_MAX_IDLE_FRAMES, _IDLE_FRAMES_PER_S = 10_000, 1_000
"""In a burst, and in the long run."""
_FRAME_HEAD = struct.Struct(">HBHL")
_STREAM_ID = 2**31 - 1
"""The bit above is reserved."""
_MAX_CONTINUATIONS = 16
_DATA, _HEADERS = DataFrame.type << 8, HeadersFrame.type << 8
_PLAIN = {_DATA: False, _DATA | 1: True, _HEADERS | 4: False, _HEADERS | 5: True}
"""Type and flags of frames without padding or priority, whose header ends with them, and whether they end a stream."""
_WIDENS, _INCREMENT_BYTES = WindowUpdateFrame.type << 8, 4


class CallFrame(NamedTuple):
    """A frame of a kind that every call has."""

    type: int
    """That of DataFrame, HeadersFrame or WindowUpdateFrame."""
    stream_id: int
    content: bytes
    """Without padding. A header is complete."""
    is_last: bool = False
    """Whether the client sends no more on the stream."""
    padding: int = 0
    """Bytes that count for flow control beside the content."""


class FrameReader:
    """Splits the data of a connection into frames, in the order that the standard allows.

    hyperframe takes ten times as long for a frame as it takes to read a plain one here, and a call has up to four.
    """

    def __init__(self) -> None:
        self._data, self._at = b"", 0  # received data, and how much of it has been read
        self._has_preface = self._has_settings = False
        self._opening: HeadersFrame | None = None  # its header continues in the next frame
        self._continuations = 0

    def add(self, data: bytes) -> None:
        """Add received data."""
        self._data, self._at = self._data[self._at :] + data, 0

    def read(self) -> Iterator[CallFrame | Frame]:
        """Yield the complete frames, each of them once. The frames of one header are joined.

        Raises:
            ProtocolError: the client does not speak HTTP/2, or sends more than it may.
            HyperframeError: a frame is invalid.
        """
        data = self._data
        if not self._has_preface:
            if not data.startswith(PREFACE[: len(data)]):
                raise ProtocolError(Code.PROTOCOL_ERROR, "no HTTP/2 preface")
            if len(data) < len(PREFACE):
                return
            self._has_preface, self._at = True, len(PREFACE)
        while len(data) - self._at >= _FRAME_HEAD.size:
            high, low, kind, stream_id = _FRAME_HEAD.unpack_from(data, self._at)
            start, begin, size = self._at, self._at + _FRAME_HEAD.size, high << 8 | low
            if size > FIRST_MAX_FRAME:
                raise ProtocolError(Code.FRAME_SIZE_ERROR, f"a frame of {size} bytes: at most {FIRST_MAX_FRAME}")
            if begin + size > len(data):
                return
            self._at = begin + size
            is_plain = kind in _PLAIN or (kind == _WIDENS and size == _INCREMENT_BYTES)
            if is_plain and self._has_settings and self._opening is None:
                yield CallFrame(kind >> 8, stream_id & _STREAM_ID, data[begin : self._at], _PLAIN.get(kind, False))
            elif whole := self._joined(_parsed(data[start : self._at])):
                yield whole

    def _joined(self, frame: Frame) -> CallFrame | Frame | None:
        """Return a frame, or None if a header continues. Raises ProtocolError if this frame may not come now."""
        if not self._has_settings:
            if not isinstance(frame, SettingsFrame):
                raise ProtocolError(Code.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self._has_settings = True
        if isinstance(frame, PushPromiseFrame):
            raise ProtocolError(Code.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        if self._opening is not None or isinstance(frame, ContinuationFrame):
            return self._continued(frame)
        if isinstance(frame, HeadersFrame) and "END_HEADERS" not in frame.flags:
            self._opening, self._continuations = frame, 0
            return None
        return _call_frame(frame) if isinstance(frame, DataFrame | HeadersFrame) else frame

    def _continued(self, frame: Frame) -> CallFrame | None:
        opening = self._opening
        if opening is None or not isinstance(frame, ContinuationFrame) or opening.stream_id != frame.stream_id:
            raise ProtocolError(Code.PROTOCOL_ERROR, "a header is not continued, or has not begun")
        self._continuations += 1
        opening.data += frame.data
        if self._continuations > _MAX_CONTINUATIONS or len(opening.data) > MAX_HEADER_BYTES:
            raise ProtocolError(
                Code.ENHANCE_YOUR_CALM, f"a header of more than {MAX_HEADER_BYTES} bytes, or in too many frames"
            )
        if "END_HEADERS" not in frame.flags:
            return None
        self._opening = None
        return _call_frame(opening)


def _parsed(content: bytes) -> Frame:
    """Return a whole frame. Raises HyperframeError if it is invalid."""
    view = memoryview(content)
    frame, _ = Frame.parse_frame_header(view[: _FRAME_HEAD.size])
    frame.parse_body(view[_FRAME_HEAD.size :])
    return frame


def _call_frame(frame: DataFrame | HeadersFrame) -> CallFrame:
    padding = frame.flow_controlled_length - len(frame.data) if isinstance(frame, DataFrame) else 0
    return CallFrame(frame.type, frame.stream_id, frame.data, "END_STREAM" in frame.flags, padding)


class IdleFrames:
    """Counts the frames of a connection that ask for nothing, or that cancel a request."""

    def __init__(self) -> None:
        self._num_frames, self._counted_s = 0.0, 0.0

    def count(self) -> bool:
        """Count one more. Return whether there are too many. Raises ProtocolError if the client still goes on."""
        now_s = time.monotonic()
        forgiven = (now_s - self._counted_s) * _IDLE_FRAMES_PER_S
        self._num_frames, self._counted_s = max(0.0, self._num_frames - forgiven) + 1, now_s
        if self._num_frames > 2 * _MAX_IDLE_FRAMES:
            raise ProtocolError(Code.ENHANCE_YOUR_CALM, "too many frames that ask for nothing")
        return self._num_frames > _MAX_IDLE_FRAMES
