"""The frames that a client of HTTP/2 sends: https://www.rfc-editor.org/rfc/rfc9113#section-4"""

from collections.abc import Iterator

from hyperframe.frame import ContinuationFrame, Frame, HeadersFrame, PushPromiseFrame, SettingsFrame

from app.serving.transport.call_head import MAX_HEADER_BYTES
from app.serving.transport.http2_stream import FIRST_MAX_FRAME, Code, ProtocolError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEAD = 9
_MAX_CONTINUATIONS = 16


class FrameReader:
    """Cuts what comes on a connection into frames, in the order that the standard allows."""

    def __init__(self) -> None:
        self._kept = b""  # the beginning of a frame, or of the preface
        self._has_preface = self._has_settings = False
        self._opening: HeadersFrame | None = None  # its header goes on in the next frame
        self._continuations = 0

    def read(self, data: bytes) -> Iterator[Frame]:
        """Return the frames that are whole now. Those of a header are one.

        Raises:
            ProtocolError: the client does not speak HTTP/2, or sends more than it may.
            HyperframeError: a frame is none.
        """
        data, at = self._kept + data if self._kept else data, 0
        self._kept = b""
        if not self._has_preface:
            if not data.startswith(PREFACE[: len(data)]):
                raise ProtocolError(Code.PROTOCOL_ERROR, "no preface of HTTP/2")
            self._has_preface = len(data) >= len(PREFACE)
            at = len(PREFACE) if self._has_preface else len(data)
            self._kept = b"" if self._has_preface else data
        view = memoryview(data)
        while len(data) - at >= _FRAME_HEAD:
            frame, size = Frame.parse_frame_header(view[at : at + _FRAME_HEAD])
            if size > FIRST_MAX_FRAME:
                raise ProtocolError(Code.FRAME_SIZE_ERROR, f"a frame of {size} bytes: at most {FIRST_MAX_FRAME}")
            end = at + _FRAME_HEAD + size
            if end > len(data):
                break
            frame.parse_body(view[at + _FRAME_HEAD : end])
            at = end
            if whole := self._joined(frame):
                yield whole
        self._kept = self._kept or data[at:]

    def _joined(self, frame: Frame) -> Frame | None:
        """Return a frame, or None where a header goes on. Raises ProtocolError: this frame may not come now."""
        if not self._has_settings:
            if not isinstance(frame, SettingsFrame):
                raise ProtocolError(Code.PROTOCOL_ERROR, "no SETTINGS first")
            self._has_settings = True
        if isinstance(frame, PushPromiseFrame):
            raise ProtocolError(Code.PROTOCOL_ERROR, "a client that pushes")
        if self._opening is not None or isinstance(frame, ContinuationFrame):
            return self._continued(frame)
        if isinstance(frame, HeadersFrame) and "END_HEADERS" not in frame.flags:
            self._opening, self._continuations = frame, 0
            return None
        return frame

    def _continued(self, frame: Frame) -> Frame | None:
        opening = self._opening
        if opening is None or not isinstance(frame, ContinuationFrame) or opening.stream_id != frame.stream_id:
            raise ProtocolError(Code.PROTOCOL_ERROR, "a header is not continued, or has not begun")
        self._continuations += 1
        opening.data += frame.data
        if self._continuations > _MAX_CONTINUATIONS or len(opening.data) > MAX_HEADER_BYTES:
            raise ProtocolError(
                Code.ENHANCE_YOUR_CALM, f"a header of more than {MAX_HEADER_BYTES} bytes, or of many frames"
            )
        if "END_HEADERS" not in frame.flags:
            return None
        self._opening = None
        return opening
