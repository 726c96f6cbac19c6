"""HTTP/2 for calls with one request and one answer.

hyperframe reads and writes frames, and hpack reads and writes headers. The states of streams are kept here. h2 could
keep them, but takes more CPU for a small request than everything else together. A client behind HAProxy shares its
connection with others, so an invalid request ends only its own stream.
https://www.rfc-editor.org/rfc/rfc9113
"""

import asyncio
import time
from collections.abc import Callable, MutableSet
from itertools import islice
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

from app.serving.transport.call_head import CallHead, HeadReader
from app.serving.transport.http2_frames import (
    HELLO,
    MAX_STREAMS,
    STREAM_WINDOW,
    TOTAL_WINDOW,
    CallFrame,
    FrameReader,
    IdleFrames,
)
from app.serving.transport.http2_stream import LARGEST_WINDOW, Call, Code, ProtocolError, Sender, Stream, peer_of

_RECEIVE_TIMEOUT_S, _SEND_TIMEOUT_S, _LEAVE_TIMEOUT_S = 30.0, 60.0, 5.0
"""Time to receive a part of a request, for the client to read a part of its answers, and to read them while closing."""
_MAX_FRAMES_AT_A_TIME = 256
"""After so many, other connections have their turn."""
_LOOK_S = 5.0
"""Between checks for idle or stuck streams and connections."""
_FAREWELL_S, _GRACE_S = 1.0, 0.2
"""How long a closing connection still takes calls: at most, if the client does not confirm that it knows; and once it
has confirmed, for calls that HAProxy had already assigned to the connection."""
_FAREWELL = b"farewell"


class Http2Protocol(asyncio.Protocol):
    """A connection that begins with the HTTP/2 preface. uvicorn calls its ``shutdown``."""

    def __init__(
        self, begin: Callable[[Stream, CallHead], Call], connections: MutableSet[Any], keep_alive_s: float
    ) -> None:
        """Begin each request with ``begin``.

        Args:
            connections: the listener's open connections, to which this one adds itself.
            keep_alive_s: a connection is closed after this time without a request.
        """
        self._begin = begin
        self._connections = connections
        self._keep_alive_s = keep_alive_s
        self._frames, self._heads, self._idle_frames = FrameReader(), HeadReader(), IdleFrames()
        self._streams: dict[int, Stream] = {}
        self._last_id = self._received = 0
        self._is_leaving = self._is_last_call = False
        self._idle_since_s = time.monotonic()
        self._stuck_since_s: float | None = None
        """When the client began to read too slowly, or the connection began to close."""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of asyncio's
        self._peer = peer_of(transport.get_extra_info("peername"))
        self._sender = Sender(self._transport.write, self._forget)
        self._connections.add(self)
        self._look()
        self._transport.write(HELLO)

    def connection_lost(self, _: Exception | None) -> None:
        if self._timer:
            self._timer.cancel()
        self._connections.discard(self)
        self._forget_all()

    def pause_writing(self) -> None:
        self._sender.is_paused = True
        self._stuck_since_s = self._stuck_since_s or time.monotonic()
        self._transport.pause_reading()  # otherwise its answers would pile up here

    def resume_writing(self) -> None:
        self._sender.is_paused = False
        if not self._transport.is_closing():
            self._stuck_since_s = None
        self._sender.flush()
        self._take_frames()

    def data_received(self, data: bytes) -> None:
        self._frames.add(data)
        self._take_frames()

    def _take_frames(self) -> None:
        try:
            self._take_some_frames()
        except ProtocolError as fault:
            self._fail(fault.code, str(fault))
        except HPACKError as error:
            self._fail(Code.COMPRESSION_ERROR, str(error))
        except HyperframeError as error:
            self._fail(Code.PROTOCOL_ERROR, str(error))

    def shutdown(self) -> None:
        """Answer all requests, including those on their way, then close."""
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
        self._forget(stream)

    def _take_some_frames(self) -> None:
        """Take received frames, in turns with other connections, as long as the client reads its answers."""
        num_taken = 0
        for frame in islice(self._frames.read() if self._can_take else (), _MAX_FRAMES_AT_A_TIME):
            take = _TAKE.get(frame.type)
            if take:
                take(self, frame)
            else:
                self._count_idle_frame()
            num_taken += 1
            if not self._can_take:
                break
        if num_taken == _MAX_FRAMES_AT_A_TIME:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._take_frames)
        elif self._can_take:
            self._transport.resume_reading()

    @property
    def _can_take(self) -> bool:
        return not (self._sender.is_paused or self._transport.is_closing())

    def _take_head(self, frame: CallFrame) -> None:
        head = self._heads.read(frame.content)  # even if it is not needed: later blocks depend on it
        if not frame.stream_id % 2:
            raise ProtocolError(Code.PROTOCOL_ERROR, "a stream with an even number")
        if frame.stream_id <= self._last_id:
            self._take_trailers(frame)
            return
        if self._is_last_call or len(self._streams) >= MAX_STREAMS:
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
        stream.is_whole = frame.is_last
        stream.call = call = self._begin(stream, head)
        call.begin()
        if stream.is_whole:
            call.finish()

    def _take_trailers(self, frame: CallFrame) -> None:
        stream = self._streams.get(frame.stream_id)
        if stream is None or stream.is_whole or not frame.is_last:
            self._count_idle_frame()
            if stream:
                stream.reset(Code.PROTOCOL_ERROR)
            return
        self._finish(stream)

    def _take_data(self, frame: CallFrame) -> None:
        stream, size = self._streams.get(frame.stream_id), len(frame.content) + frame.padding
        if not frame.stream_id or (frame.stream_id > self._last_id and not self._is_last_call):
            raise ProtocolError(Code.PROTOCOL_ERROR, "data for a stream that is not open")
        self._received += size
        if self._received > TOTAL_WINDOW:
            raise ProtocolError(Code.FLOW_CONTROL_ERROR, "more data than the connection's window allows")
        if self._received >= TOTAL_WINDOW // 2:
            self._write(WindowUpdateFrame(0, window_increment=self._received))
            self._received = 0
        if stream is None or stream.is_whole or (not size and not frame.is_last):
            self._count_idle_frame()
        if stream is None or stream.call is None or stream.rest is not None:
            return
        stream.received += size
        if stream.is_whole or stream.received > STREAM_WINDOW:
            stream.reset(Code.FLOW_CONTROL_ERROR if not stream.is_whole else Code.PROTOCOL_ERROR)
            return
        if frame.content:
            stream.call.receive(frame.content)
        if frame.is_last:
            self._finish(stream)
        elif stream.received >= STREAM_WINDOW // 2 and stream.call is not None:
            self._write(WindowUpdateFrame(stream.id, window_increment=stream.received))
            stream.received = 0

    def _finish(self, stream: Stream) -> None:
        stream.is_whole = True
        if stream.call is not None and stream.rest is None:
            stream.call.finish()

    def _take_reset(self, frame: RstStreamFrame) -> None:
        if frame.stream_id > self._last_id and not self._is_last_call:
            raise ProtocolError(Code.PROTOCOL_ERROR, "a reset of a stream that is not open")
        self._count_idle_frame()
        if stream := self._streams.get(frame.stream_id):
            self._forget(stream)

    def _take_settings(self, frame: SettingsFrame) -> None:
        self._count_idle_frame()
        if "ACK" in frame.flags:
            return
        sizes = frame.settings
        if SettingsFrame.MAX_FRAME_SIZE in sizes:
            self._sender.set_max_frame(sizes[SettingsFrame.MAX_FRAME_SIZE])
        if SettingsFrame.INITIAL_WINDOW_SIZE in sizes:
            self._sender.set_first_window(sizes[SettingsFrame.INITIAL_WINDOW_SIZE], self._streams.values())
        self._write(SettingsFrame(flags=["ACK"]))

    def _take_ping(self, frame: PingFrame) -> None:
        self._count_idle_frame()
        if "ACK" not in frame.flags:
            self._write(PingFrame(opaque_data=frame.opaque_data, flags=["ACK"]))
        elif frame.opaque_data == _FAREWELL and self._is_leaving:
            asyncio.get_running_loop().call_later(_GRACE_S, self._call_last)

    def _take_window_update(self, frame: CallFrame) -> None:
        stream, increment = self._streams.get(frame.stream_id), int.from_bytes(frame.content, "big")
        if not 0 < increment <= LARGEST_WINDOW:
            raise ProtocolError(Code.PROTOCOL_ERROR, f"a window wider by {increment} bytes: expected 1 to 2^31-1")
        if stream or not frame.stream_id:
            self._sender.widen(stream, increment)
        elif frame.stream_id > self._last_id and not self._is_last_call:
            raise ProtocolError(Code.PROTOCOL_ERROR, "a window update for a stream that is not open")

    def _take_goaway(self, _: GoAwayFrame) -> None:
        self._is_leaving = True
        self._call_last()

    def _count_idle_frame(self) -> None:
        """Close the connection if its client sends too many idle frames."""
        if self._idle_frames.count():
            self.shutdown()

    def _look(self) -> None:
        """End stuck streams, and close the connection if it is idle or stuck."""
        now_s = time.monotonic()
        limit_s = _LEAVE_TIMEOUT_S if self._is_leaving or self._transport.is_closing() else _SEND_TIMEOUT_S
        if self._stuck_since_s is not None and now_s - self._stuck_since_s > limit_s:
            self._transport.abort()
            return
        for stream in list(self._streams.values()):
            waited_s = now_s - stream.moved_s
            if stream.rest is not None and waited_s > limit_s:
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
            self._close()

    def _fail(self, code: Code, told: str) -> None:
        self._write(GoAwayFrame(last_stream_id=self._last_id, error_code=code, additional_data=told.encode()[:256]))
        self._close()
        self._forget_all()

    def _close(self) -> None:
        self._stuck_since_s = self._stuck_since_s or time.monotonic()
        self._transport.close()  # after everything is written

    def _forget_all(self) -> None:
        for stream in list(self._streams.values()):
            self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        self._streams.pop(stream.id, None)
        self._sender.forget(stream)
        call, stream.call = stream.call, None
        if call is not None:
            call.end()
        if not self._streams:
            self._idle_since_s = time.monotonic()
            self._close_if_done()

    def _write(self, frame: Frame) -> None:
        self._transport.write(frame.serialize())


_TAKE: dict[int | None, Callable[[Http2Protocol, Any], None]] = {
    DataFrame.type: Http2Protocol._take_data,
    GoAwayFrame.type: Http2Protocol._take_goaway,
    HeadersFrame.type: Http2Protocol._take_head,
    PingFrame.type: Http2Protocol._take_ping,
    RstStreamFrame.type: Http2Protocol._take_reset,
    SettingsFrame.type: Http2Protocol._take_settings,
    WindowUpdateFrame.type: Http2Protocol._take_window_update,
}
