"""What stands before all that Ray Serve does with a request.

Serve 2.60 asks for it where ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`` says, in each process that listens for HTTP:
its proxies, and replicas that HAProxy sends requests to. That setting is in Ray's code and tests, and not in its
documentation. Where it is not set, or should a later Ray not know it, all requests reach the endpoint through Serve:
inference then takes more CPU, and a replica that dies, or bytes that are no text in some headers, are a bare 500.
"""

import asyncio
from typing import Protocol

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.serving.transport.error_response import ErrorResponse, no_replica_answers

MIDDLEWARE = "app.serving.transport.middleware.middleware"
"""The import path that ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`` takes."""


class Direct(Protocol):
    """What answers some requests in place of Serve. Of ``DirectInference``, which proxies need not import."""

    def takes(self, scope: Scope) -> bool:
        """Whether a request is one of them."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer it."""


class RefuseUnreadableHeaders:
    """Tells a client that sent bytes as a header which Serve decodes; left to Serve, the answer would be a bare 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        try:
            await self._app(scope, receive, send)
        except UnicodeDecodeError as error:  # before the endpoint is asked, which lets no error out
            told = f"a header is not UTF-8 ({error}): send text as X-Request-ID and the like"
            await ErrorResponse(told, 400)(scope, receive, send)


class AskAgainWhereNobodyAnswers:
    """Tells a client to come again whose replica died; Serve's proxies send nothing, and uvicorn then a bare 500."""

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
            await no_replica_answers()(scope, receive, send)


class AnswerDirectly:
    """Keeps from Serve the requests that are answered directly."""

    def __init__(self, app: ASGIApp, direct: Direct) -> None:
        self._app = app
        self._direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await (self._direct if self._direct.takes(scope) else self._app)(scope, receive, send)


_direct: dict[asyncio.AbstractEventLoop, Direct] = {}
"""At most one: a process is one replica, or none."""


def answer_directly(direct: Direct) -> None:
    """Let it answer before Serve does, where this process listens on the event loop that runs now.

    To be called before Serve listens. Where Serve listens on another loop, it alone may ask the endpoint.
    """
    _direct[asyncio.get_running_loop()] = direct


def middleware() -> list[Middleware]:
    """As Serve asks for it; the last one stands before the others."""
    direct = _direct.get(asyncio.get_running_loop()) if _direct else None
    first = Middleware(AnswerDirectly, direct) if direct else Middleware(AskAgainWhereNobodyAnswers)
    return [Middleware(RefuseUnreadableHeaders), first]
