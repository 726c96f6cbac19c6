"""What stands before all that Ray Serve does with a request."""

from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from app.serving.protocol.bodies import ErrorBody

MIDDLEWARE = "app.serving.middleware.middleware"
"""The import path that ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`` takes."""


class RefuseUnreadableHeaders:
    """Tells a client that sent bytes as a header which Serve decodes; left to Serve, the answer would be a bare 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        try:
            await self._app(scope, receive, send)
        except UnicodeDecodeError as error:  # before the endpoint is asked, which lets no error out
            told = ErrorBody(error=f"a header is not UTF-8 ({error}): send text as X-Request-ID and the like")
            await JSONResponse(told.model_dump(), 400)(scope, receive, send)


def middleware() -> list[Middleware]:
    """As Serve asks for it."""
    return [Middleware(RefuseUnreadableHeaders)]
