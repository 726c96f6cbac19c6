"""ASGI helpers: the body of a request, and clients that go away.

https://asgi.readthedocs.io/en/latest/specs/www.html
"""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from starlette.types import Message, Receive, Scope, Send

from app.errors import DisconnectedError, RequestTooLargeError
from app.serving.protocol.infer import LIMITS

Result = TypeVar("Result")

_RECEIVE_TIMEOUT_S = 30.0
"""Time to receive a body. A slower client would occupy a place that others wait for."""
_REST_TIMEOUT_S = 1.0
"""Time to receive the rest of an unused body, before the response."""
_UNWATCHED_S = 0.05
"""Delay before the client is watched. Watching from the start would double the cost of a small request."""


async def read_body(headers: Mapping[str, str], receive: Receive, max_bytes: int = LIMITS.json_bytes) -> bytes:
    """Return the body of a request with these headers, whose names are in lower case.

    A body that is too large is read to its end and dropped. Otherwise HAProxy may reset the connection of a client that
    is still sending, before the client gets the answer. Above the limit for any body, reading stops at once, and
    ``close_if_unread`` reads for one more second.

    Args:
        max_bytes: maximum size of the body; by default that of JSON.

    Raises:
        RequestTooLargeError: the body is larger.
        DisconnectedError: the client went away before the end of the body.
        TimeoutError: the body does not arrive in time.
    """
    parts: list[bytes] = []

    # The announced size, or the received one if that is more. The server has checked that the header is a number.
    size = int(headers.get("content-length", 0))
    received = 0
    try:
        async with asyncio.timeout(_RECEIVE_TIMEOUT_S):
            while size <= LIMITS.body_bytes:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise DisconnectedError("the connection was closed before the body ended: send all of it")
                part = message.get("body", b"")
                received += len(part)
                size = max(size, received)
                if size <= max_bytes:
                    parts.append(part)
                else:
                    # What was read is not needed any more, so its memory is freed while the rest is drained.
                    parts.clear()
                if not message.get("more_body"):
                    break
    except TimeoutError:
        raise TimeoutError(f"the body did not come within {_RECEIVE_TIMEOUT_S:g} s: send it faster") from None
    if size > max_bytes:
        raise RequestTooLargeError(
            f"the body is larger than {max_bytes} bytes: send less in a request, and large tensors of infer as bytes"
        )
    return b"".join(parts)  # does not copy a single part


def close_if_unread(scope: Scope, receive: Receive, send: Send) -> tuple[Receive, Send]:
    """Return ``receive`` and ``send`` for a response that closes the connection unless the body ends before it.

    The response waits up to a second for the rest of the body. Without this, a client could keep its connection
    forever: uvicorn discards data after the response, but counts it as activity. A client that waits for the status 100
    before it sends its body is not asked for the body.
    """
    # The usual case of a GET, which needs no wrapper.
    if not has_body(scope):
        return receive, send
    has_ended, awaits_100 = False, any(name == b"expect" for name, _ in scope["headers"])

    async def receive_part() -> Message:
        nonlocal has_ended, awaits_100
        awaits_100 = False  # servers send the status 100 at the first call
        message = await receive()
        has_ended = not message.get("more_body")
        return message

    async def has_rest() -> bool:
        try:
            async with asyncio.timeout(_REST_TIMEOUT_S):
                while not has_ended:
                    await receive_part()
        except TimeoutError:
            return False
        return True

    async def send_part(message: Message) -> None:
        if message["type"] == "http.response.start" and not has_ended and (awaits_100 or not await has_rest()):
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return receive_part, send_part


def has_body(scope: Scope) -> bool:
    """Return whether a request announces a body."""
    return scope["type"] == "http" and any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of ``work``. If the client goes away first, cancel the work.

    Args:
        receive: the ASGI channel of a request whose body has been read.

    Raises:
        DisconnectedError: the client has gone.
    """
    watch = _ClientWatch(receive)
    try:
        return await work
    except asyncio.CancelledError:
        # Somebody else has cancelled the task, and has to learn that it ended.
        if not watch.gone:
            raise
        raise DisconnectedError("the connection was closed before the answer") from None
    finally:
        watch.stop()


class _ClientWatch:
    """Cancels the current task if its client goes away."""

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self._receive = receive
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(_UNWATCHED_S, self._start)
        self._watch: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Stop watching, because the task is done."""
        self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()

    def _start(self) -> None:
        self._watch = asyncio.create_task(self._cancel_if_gone())

    async def _cancel_if_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        assert self._task is not None
        self.gone = True
        self._task.cancel()
