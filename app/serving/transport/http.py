"""An endpoint over HTTP: who may ask, inference, and the way to the other routes.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
"""

import re

from starlette.types import Receive, Scope, Send

from app.errors import UnauthorizedError
from app.serving.endpoint import Endpoint
from app.serving.protocol.rest import largest_body, read_infer, write_infer
from app.serving.transport.asgi import close_if_unread, headers_of, read_body, unless_gone
from app.serving.transport.refusal import error_response
from app.serving.transport.routes import is_open, routes

_INFER = re.compile("/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")


def asks_inference(scope: Scope) -> bool:
    """Whether a request is one for ``infer``, of whichever model."""
    return _inference(scope) is not None


class HttpApi:
    """The ASGI application. Inference, which is asked most, bypasses the framework that the other routes have."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._others = routes(endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        receive, send = close_if_unread(scope, receive, send)
        if error := self.refusal(scope):
            await error_response(error)(scope, receive, send)
        elif asks_inference(scope):
            await self.infer(scope, receive, send)
        else:
            await self._others(scope, receive, send)

    def refusal(self, scope: Scope) -> UnauthorizedError | None:
        """Return the error of a request that lacks the token that its path asks for."""
        if scope["type"] == "http" and not is_open(scope["path"]):
            try:
                self._endpoint.access.check(_authorization(scope))
            except UnauthorizedError as error:
                return error
        return None

    async def infer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for inference that may ask for it."""
        path = _inference(scope)
        assert path is not None
        name, version = path[1], path[2]
        try:
            headers = headers_of(scope)
            body = await read_body(headers, receive, largest_body(headers))
            chosen = self._endpoint.route(name, version)
            request = read_infer(body, headers, name, version, chosen.inputs)
            response = await unless_gone(receive, chosen.infer(request))
            if response is None:
                return
            content, response_headers = write_infer(response, request, headers.get("accept-encoding", ""))
        except Exception as error:
            await error_response(error)(scope, receive, send)
            return
        raw = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in response_headers.items()]
        raw.append((b"content-length", b"%d" % len(content)))
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        await send({"type": "http.response.body", "body": content})


def _inference(scope: Scope) -> re.Match[str] | None:
    """Model and version, if one is named, that a request asks for inference."""
    asks = scope["type"] == "http" and scope["method"] == "POST"
    return _INFER.fullmatch(scope["path"]) if asks else None


def _authorization(scope: Scope) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == b"authorization"), None)
