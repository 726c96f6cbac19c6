"""A request as ASGI servers hand it over: its body, and whether somebody still waits for the answer.

https://asgi.readthedocs.io/en/latest/specs/www.html
"""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from starlette.types import Receive, Scope

from app.errors import RequestError, RequestTooLargeError
from app.serving.protocol.limits import LIMITS

Result = TypeVar("Result")

_RECEIVE_TIMEOUT_S = 30.0
"""For a body. Who sends more slowly would keep a place that others wait for."""
_UNWATCHED_S = 0.05
"""Work that is done sooner is not watched: that would cost as much as the rest of a small request."""


def headers_of(scope: Scope) -> dict[str, str]:
    """The headers of a request by their names, which are in lower case; of one that comes twice the last."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


async def read_body(headers: Mapping[str, str], receive: Receive, most_bytes: int = LIMITS.json_bytes) -> bytes:
    """The body of a request with these headers, whose names are in lower case.

    What is too large is read to its end, unless it is larger than any body may be, and not kept: through HAProxy, a
    client that is answered while it still sends may find its connection reset, and no answer.

    Args:
        most_bytes: that it may have; but for tensors as bytes, no more than JSON.

    Raises:
        RequestTooLargeError: it is larger.
        RequestError: the client went away in the middle of it.
        TimeoutError: it does not come in time. The response must close the connection; otherwise a client could send
            the rest, which is not read, for ever.
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
