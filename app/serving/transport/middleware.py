"""Middleware that runs before Ray Serve handles a request.

Serve 2.60 calls the function that ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`` names in each process that listens for
HTTP: in its proxies, and in the replicas that HAProxy sends requests to. Ray's code and tests use that setting, but its
documentation does not mention it. Without it, all requests reach the endpoint through Serve. Inference then takes more
CPU, and a replica that dies, or a header that is not UTF-8, gives a bare 500.
"""

import asyncio
from collections.abc import Callable

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.serving.transport.errors import ErrorResponse, no_replica_answers

MIDDLEWARE = "app.serving.transport.middleware.middleware"
"""The import path that ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`` takes."""


class RefuseUnreadableHeaders:
    """Refuse headers that Serve decodes and that are not UTF-8. Serve itself would answer a bare 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        try:
            await self._app(scope, receive, send)
        except UnicodeDecodeError as error:
            # The error is from Serve itself, because the endpoint turns every error into an answer.
            message = f"a header is not UTF-8 ({error}): send text as X-Request-ID and the like"
            await ErrorResponse(message, 400, path=scope["path"])(scope, receive, send)


class AnswerIfReplicaDied:
    """Answer 503 if a replica died. Serve's proxies then send nothing, and uvicorn would send a bare 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        is_answered = scope["type"] != "http"

        async def watched(message: Message) -> None:
            nonlocal is_answered
            is_answered = True
            await send(message)

        await self._app(scope, receive, watched)
        if not is_answered:
            await no_replica_answers(scope["path"])(scope, receive, send)


InFrontOf = Callable[[ASGIApp], ASGIApp]
"""Wraps an application, and answers some requests in its place."""

_direct: dict[asyncio.AbstractEventLoop, InFrontOf] = {}
"""At most one entry: a process is one replica, or none."""


def answer_directly(direct: InFrontOf) -> None:
    """Put ``direct`` in front of Serve on listeners of the running event loop.

    Call this before Serve listens. Listeners of other loops are left to Serve, since the endpoint belongs to this loop.
    """
    _direct[asyncio.get_running_loop()] = direct


def middleware() -> list[Middleware]:
    """Return the middleware for Serve. The last in the list is the outermost."""
    direct = _direct.get(asyncio.get_running_loop()) if _direct else None
    return [Middleware(RefuseUnreadableHeaders), Middleware(direct or AnswerIfReplicaDied)]
