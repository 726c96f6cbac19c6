"""HTTP/2 for calls that are one request and one answer.

hyperframe reads and writes frames, hpack headers. The states of streams are kept here: h2, which would keep them, takes
more CPU for a small request than everything else together. A client behind HAProxy shares its connection with others:
what is wrong with one request ends its stream alone.
https://www.rfc-editor.org/rfc/rfc9113
"""

import asyncio
import time
from collections.abc import Callable, MutableSet
from typing import Any, cast

from hpack import HPACKError
from hyperframe.exceptions import HyperframeError
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from app.serving.transport.call_head import MAX_HEADER_BYTES, CallHead, HeadReader
from app.serving.transport.http2_frames import FrameReader
from app.serving.transport.http2_stream import (
    FIRST_WINDOW,
    LARGEST_WINDOW,
    Call,
    Code,
    ProtocolError,
    Sender,
    Stream,
    peer_of,
)

_MAX_STREAMS = 256
_STREAM_WINDOW, _CONNECTION_WINDOW = 2**20, 2**24
_RECEIVE_TIMEOUT_S, _SEND_TIMEOUT_S = 30.0, 60.0
_LOOK_S = 5.0
"""Between looks at what is idle or stuck."""
_FAREWELL_S, _GRACE_S = 1.0, 0.2
"""For calls that were sent before the client has heard that this side leaves; and those that HAProxy, which has heard
it, had given to the connection before."""
_FAREWELL = b"farewell"
_MAX_IDLE_FRAMES, _IDLE_FRAMES_PER_S = 10_000, 1_000
"""Frames that ask for nothing, or take back what was asked: together, and for long."""
_GREETING = (
    SettingsFrame(
        settings={
            SettingsFrame.MAX_CONCURRENT_STREAMS: _MAX_STREAMS,
            SettingsFrame.INITIAL_WINDOW_SIZE: _STREAM_WINDOW,
            SettingsFrame.MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES,
        }
    ).serialize()
    + WindowUpdateFrame(0, window_increment=_CONNECTION_WINDOW - FIRST_WINDOW).serialize()
)
_SETTINGS_ACK = SettingsFrame(flags=["ACK"]).serialize()


class Http2Protocol(asyncio.Protocol):
    """A connection that begins with HTTP/2's preface. Its ``shutdown`` is what uvicorn asks of a protocol."""

    def __init__(
        self, begin: Callable[[Stream, CallHead], Call], connections: MutableSet[Any], keep_alive_s: float
    ) -> None:
        """Begin each request by ``begin``.

        Args:
            connections: those of the listener, for as long as this one lasts.
            keep_alive_s: after so long without a request, the connection is left.
        """
        self._begin = begin
        self._connections = connections
        self._keep_alive_s = keep_alive_s
        self._frames, self._heads = FrameReader(), HeadReader()
        self._streams: dict[int, Stream] = {}
        self._last_id = 0
        self._received = 0
        self._is_leaving = self._is_last_call = False
        self._idle_frames, self._idle_frames_s = 0.0, 0.0
        self._idle_since_s = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of no class of asyncio's
        self._peer = peer_of(transport.get_extra_info("peername"))
        self._sender = Sender(self._transport.write, self._forget)
        self._connections.add(self)
        self._look()
        self._transport.write(_GREETING)

    def connection_lost(self, _: Exception | None) -> None:
        if self._timer:
            self._timer.cancel()
        self._connections.discard(self)
        self._abandon_all()

    def pause_writing(self) -> None:
        self._sender.is_paused = True
        self._transport.pause_reading()  # else what it asks for would gather here

    def resume_writing(self) -> None:
        self._sender.is_paused = False
        self._transport.resume_reading()
        self._sender.flush()

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.read(data):
                self._take(frame)
                if self._transport.is_closing():
                    return
        except ProtocolError as fault:
            self._fail(fault.code, str(fault))
        except HPACKError as error:
            self._fail(Code.COMPRESSION_ERROR, str(error))
        except HyperframeError as error:
            self._fail(Code.PROTOCOL_ERROR, str(error))

    def shutdown(self) -> None:
        """Answer what has been asked, also what is on its way, then close."""
        if not self._is_leaving:
            self._is_leaving = True
            self._write(GoAwayFrame(last_stream_id=LARGEST_WINDOW))
            self._write(PingFrame(opaque_data=_FAREWELL))
            asyncio.get_running_loop().call_later(_FAREWELL_S, self._call_last)

    def respond(self, stream: Stream, head: bytes, body: bytes, trailers: bytes) -> None:
        self._sender.respond(stream, head, body, trailers)

    def refuse(self, stream: Stream, trailers: bytes) -> None:
        self._sender.refuse(stream, trailers)

    def reset(self, stream: Stream, code: Code) -> None:
        self._write(RstStreamFrame(stream.id, code))
        self._drop(stream)

    def _take(self, frame: Frame) -> None:
        take = _TAKE.get(type(frame))
        if take:
            take(self, frame)
        else:
            self._count_idle_frame()

    def _take_head(self, frame: HeadersFrame) -> None:
        head = self._heads.read(frame.data)  # also where it is not needed: the next ones depend on it
        if not frame.stream_id % 2:
            raise ProtocolError(Code.PROTOCOL_ERROR, "a stream of an even number")
        if frame.stream_id <= self._last_id:
            self._take_trailers(frame)
            return
        if self._is_last_call or len(self._streams) >= _MAX_STREAMS:
            self._last_id = frame.stream_id if not self._is_last_call else self._last_id
            self._count_idle_frame()
            self._write(RstStreamFrame(frame.stream_id, Code.REFUSED_STREAM))
            return
        self._last_id = frame.stream_id
        stream = Stream(self, frame.stream_id, self._sender.first_window, self._peer)
        if head is None:
            self._count_idle_frame()
            self._write(RstStreamFrame(stream.id, Code.PROTOCOL_ERROR))
            return
        self._streams[stream.id] = stream
        stream.is_whole = "END_STREAM" in frame.flags
        stream.call = call = self._begin(stream, head)
        call.begin()
        if stream.is_whole:
            call.finish()

    def _take_trailers(self, frame: HeadersFrame) -> None:
        stream = self._streams.get(frame.stream_id)
        if stream is None or stream.is_whole or "END_STREAM" not in frame.flags:
            self._count_idle_frame()
            if stream:
                stream.reset(Code.PROTOCOL_ERROR)
            return
        self._finish(stream)

    def _take_data(self, frame: DataFrame) -> None:
        stream, size = self._streams.get(frame.stream_id), frame.flow_controlled_length
        if frame.stream_id > self._last_id and not self._is_last_call:
            raise ProtocolError(Code.PROTOCOL_ERROR, "data of a stream that is not open")
        self._received += size
        if self._received > _CONNECTION_WINDOW:
            raise ProtocolError(Code.FLOW_CONTROL_ERROR, "more data than the connection has room for")
        if self._received >= _CONNECTION_WINDOW // 2:
            self._write(WindowUpdateFrame(0, window_increment=self._received))
            self._received = 0
        if stream is None or stream.is_whole or (not size and "END_STREAM" not in frame.flags):
            self._count_idle_frame()
        if stream is None or stream.call is None or stream.rest is not None:
            return
        stream.received += size
        if stream.is_whole or stream.received > _STREAM_WINDOW:
            stream.reset(Code.FLOW_CONTROL_ERROR if not stream.is_whole else Code.PROTOCOL_ERROR)
            return
        if frame.data:
            stream.call.receive(frame.data)
        if "END_STREAM" in frame.flags:
            self._finish(stream)
        elif stream.received >= _STREAM_WINDOW // 2 and stream.call is not None:
            self._write(WindowUpdateFrame(stream.id, window_increment=stream.received))
            stream.received = 0

    def _finish(self, stream: Stream) -> None:
        stream.is_whole = True
        if stream.call is not None and stream.rest is None:
            stream.call.finish()

    def _take_reset(self, frame: RstStreamFrame) -> None:
        if frame.stream_id > self._last_id and not self._is_last_call:
            raise ProtocolError(Code.PROTOCOL_ERROR, "a stream that is not open is reset")
        self._count_idle_frame()
        if stream := self._streams.get(frame.stream_id):
            self._drop(stream)

    def _take_settings(self, frame: SettingsFrame) -> None:
        self._count_idle_frame()
        if "ACK" in frame.flags:
            return
        sizes = frame.settings
        if SettingsFrame.MAX_FRAME_SIZE in sizes:
            self._sender.set_max_frame(sizes[SettingsFrame.MAX_FRAME_SIZE])
        if SettingsFrame.INITIAL_WINDOW_SIZE in sizes:
            self._sender.set_first_window(sizes[SettingsFrame.INITIAL_WINDOW_SIZE], self._streams.values())
        self._transport.write(_SETTINGS_ACK)

    def _take_ping(self, frame: PingFrame) -> None:
        self._count_idle_frame()
        if "ACK" not in frame.flags:
            self._write(PingFrame(opaque_data=frame.opaque_data, flags=["ACK"]))
        elif frame.opaque_data == _FAREWELL and self._is_leaving:
            asyncio.get_running_loop().call_later(_GRACE_S, self._call_last)

    def _take_window_update(self, frame: WindowUpdateFrame) -> None:
        stream = self._streams.get(frame.stream_id)
        if stream or not frame.stream_id:
            self._sender.widen(stream, frame.window_increment)
        elif frame.stream_id > self._last_id and not self._is_last_call:
            raise ProtocolError(Code.PROTOCOL_ERROR, "a window of a stream that is not open")

    def _take_goaway(self, _: GoAwayFrame) -> None:
        self._is_leaving = True
        self._call_last()

    def _count_idle_frame(self) -> None:
        """Leave a client that sends too many frames for nothing; then, if it goes on, leave at once."""
        now_s = time.monotonic()
        forgiven = (now_s - self._idle_frames_s) * _IDLE_FRAMES_PER_S
        self._idle_frames, self._idle_frames_s = max(0.0, self._idle_frames - forgiven) + 1, now_s
        if self._idle_frames > 2 * _MAX_IDLE_FRAMES:
            raise ProtocolError(Code.ENHANCE_YOUR_CALM, "too many frames that ask for nothing")
        if self._idle_frames > _MAX_IDLE_FRAMES:
            self.shutdown()

    def _look(self) -> None:
        """End what is idle or stuck."""
        now_s = time.monotonic()
        for stream in list(self._streams.values()):
            waited_s = now_s - stream.moved_s
            if stream.rest is not None and waited_s > _SEND_TIMEOUT_S:
                stream.reset(Code.CANCEL)
            elif stream.call is not None and not stream.is_whole and waited_s > _RECEIVE_TIMEOUT_S:
                stream.call.expire()
        if not self._streams and now_s - self._idle_since_s >= self._keep_alive_s:
            self.shutdown()
        self._timer = asyncio.get_running_loop().call_later(min(_LOOK_S, self._keep_alive_s), self._look)

    def _call_last(self) -> None:
        """Take no more requests."""
        if not self._is_last_call and not self._transport.is_closing():
            self._is_last_call = True
            self._write(GoAwayFrame(last_stream_id=self._last_id))
            self._close_if_done()

    def _close_if_done(self) -> None:
        if self._is_last_call and not self._streams:
            self._transport.close()

    def _fail(self, code: Code, told: str) -> None:
        self._write(GoAwayFrame(last_stream_id=self._last_id, error_code=code, additional_data=told.encode()[:256]))
        self._transport.close()
        self._abandon_all()

    def _abandon_all(self) -> None:
        for stream in list(self._streams.values()):
            self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        call = stream.call
        self._forget(stream)
        if call is not None:
            call.abandon()

    def _forget(self, stream: Stream) -> None:
        self._streams.pop(stream.id, None)
        self._sender.forget(stream)
        stream.call = None
        if not self._streams:
            self._idle_since_s = time.monotonic()
            self._close_if_done()

    def _write(self, frame: Frame) -> None:
        self._transport.write(frame.serialize())


_TAKE: dict[type[Frame], Callable[[Http2Protocol, Any], None]] = {
    DataFrame: Http2Protocol._take_data,
    GoAwayFrame: Http2Protocol._take_goaway,
    HeadersFrame: Http2Protocol._take_head,
    PingFrame: Http2Protocol._take_ping,
    RstStreamFrame: Http2Protocol._take_reset,
    SettingsFrame: Http2Protocol._take_settings,
    WindowUpdateFrame: Http2Protocol._take_window_update,
}
