"""A request as ASGI servers hand it over: its body, and whether somebody still waits for the answer.

https://asgi.readthedocs.io/en/latest/specs/www.html
"""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from starlette.types import Message, Receive, Scope, Send

from app.errors import RequestError, RequestTooLargeError
from app.serving.protocol.infer import LIMITS

Result = TypeVar("Result")

_RECEIVE_TIMEOUT_S = 30.0
"""For a body. Who sends more slowly would keep a place that others wait for."""
_REST_TIMEOUT_S = 1.0
"""For the rest of a body that is not used, before the response."""
_UNWATCHED_S = 0.05
"""Work that is done sooner is not watched: that would cost as much as the rest of a small request."""


def headers_of(scope: Scope) -> dict[str, str]:
    """The headers of a request by their names, which are in lower case; of one that comes twice the last."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


async def read_body(headers: Mapping[str, str], receive: Receive, most_bytes: int = LIMITS.json_bytes) -> bytes:
    """The body of a request with these headers, whose names are in lower case.

    Too large a body is read to its end and not kept: through HAProxy, a client that is answered while it still sends
    may find its connection reset, and no answer. If it is larger than any body may be, this returns at once, and
    ``close_if_unread`` reads for a second more.

    Args:
        most_bytes: that it may have; but for tensors as bytes, no more than JSON.

    Raises:
        RequestTooLargeError: it is larger.
        RequestError: the client went away in the middle of it.
        TimeoutError: it does not come in time.
    """
    parts: list[bytes] = []
    size = int(headers.get("content-length", 0))  # announced, or what came of it; servers let nothing in but digits
    came = 0
    try:
        async with asyncio.timeout(_RECEIVE_TIMEOUT_S):
            while size <= LIMITS.body_bytes:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RequestError("the connection was closed before the body ended: send all of it")
                part = message.get("body", b"")
                came += len(part)
                size = max(size, came)
                if size <= most_bytes:
                    parts.append(part)
                else:
                    parts.clear()
                if not message.get("more_body"):
                    break
    except TimeoutError:
        raise TimeoutError(f"the body did not come within {_RECEIVE_TIMEOUT_S:g} s: send it faster") from None
    if size > most_bytes:
        raise RequestTooLargeError(
            f"the body is larger than {most_bytes} bytes: send less in a request, and large tensors of infer as bytes"
        )
    return b"".join(parts)  # a single part is given back as it is


def close_if_unread(scope: Scope, receive: Receive, send: Send) -> tuple[Receive, Send]:
    """Return ``receive`` and ``send`` for a response that closes the connection unless the body ends before it.

    The response waits up to a second for the rest of the body. Without this, a client could keep its connection for
    ever: uvicorn discards what comes after the response, and counts it as activity. A client that sends no body before
    it gets the status 100 is not asked for one.
    """
    if not _has_body(scope):
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


def _has_body(scope: Scope) -> bool:
    return scope["type"] == "http" and any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of ``work``; None if the client goes away before, and then the work is cancelled.

    Args:
        receive: of a request whose body has been read.
    """
    client = _Client(receive)
    try:
        return await work
    except asyncio.CancelledError:
        if not client.gone:
            raise
        return None
    finally:
        client.leave_alone()


class _Client:
    """Whoever waits for the task that makes this: the task is cancelled if they go away."""

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self._receive = receive
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(_UNWATCHED_S, self._start)
        self._watch: asyncio.Task[None] | None = None

    def leave_alone(self) -> None:
        """The task has done what they wait for."""
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
