"""An endpoint over HTTP: the Open Inference Protocol, natural input for people, and a page that describes both.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
"""

import math
import re
from typing import Any

from fastapi import FastAPI, Request, Response, Security
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from app.errors import OverloadError, RayloomError, UnauthorizedError
from app.serving.asgi import read_body, unless_gone
from app.serving.auth import OPEN_PATHS
from app.serving.endpoint import Endpoint
from app.serving.page import PAGE, PAGE_HEADERS
from app.serving.protocol.bodies import ErrorBody, parse_body
from app.serving.protocol.limits import LIMITS
from app.serving.protocol.management import (
    IndexRequest,
    LoadRequest,
    ModelIndex,
    ModelMetadata,
    ModelReady,
    ServerLive,
    ServerMetadata,
    ServerReady,
    Statistics,
    UnloadRequest,
)
from app.serving.protocol.model_config import config_json, model_config
from app.serving.protocol.natural import NaturalModel, PredictRequest, PredictResponse
from app.serving.protocol.rest import read_infer, write_infer
from app.serving.refusal import refusal

_PREDICT_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": PredictRequest.model_json_schema()},
            "image/*": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}
"""As OpenAPI describes it."""
_INFER = re.compile("/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")


def asks_inference(scope: Scope) -> bool:
    """Whether a request is one for ``infer``, of whichever model."""
    return _inference(scope) is not None


class HttpApi:
    """The ASGI application. Inference, which is asked most, passes by the framework that the other routes have."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._others = _routes(endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                self._endpoint.access.check(_authorization(scope))
            except UnauthorizedError as error:
                await refused(error)(scope, receive, send)
                return
        path = _inference(scope)
        if path is None:
            await self._others(scope, receive, send)
        else:
            await self._infer(path[1], path[2], scope, receive, send)

    async def _infer(self, name: str, version: str | None, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
            body = await read_body(receive)
            chosen = self._endpoint.route(name, version)
            request = read_infer(body, headers, name, version, chosen.inputs, LIMITS)
            response = await unless_gone(receive, chosen.infer(request))
            if response is None:
                return
            content, response_headers = write_infer(response, request, headers.get("accept-encoding", ""))
        except Exception as error:
            await refused(error)(scope, receive, send)
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


def refused(error: Exception) -> JSONResponse:
    """What a client is told of an error."""
    told = refusal(error)
    headers: dict[str, str] = {}
    if isinstance(error, OverloadError):
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, UnauthorizedError):
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(ErrorBody(error=told.message).model_dump(), told.http, headers)


def _routes(endpoint: Endpoint) -> FastAPI:
    """Everything but inference."""
    api = FastAPI(
        title="Rayloom",
        version=endpoint.metadata.version,
        description="Open Inference Protocol v2, all but infer",
        dependencies=[Security(HTTPBearer(auto_error=False))],  # for /docs to send the token, which HttpApi checks
    )

    @api.exception_handler(RayloomError)
    @api.exception_handler(TimeoutError)
    @api.exception_handler(Exception)
    async def _tell(_: Request, error: Exception) -> JSONResponse:
        return refused(error)

    @api.exception_handler(HTTPException)
    async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
        unknown = f"no {request.method} {request.scope['path']} here: see /docs"
        detail = unknown if error.detail == "Not Found" else error.detail
        return JSONResponse({"error": detail}, error.status_code, error.headers)

    @api.get("/", include_in_schema=False)
    async def page() -> Response:
        """The models, and one to try."""
        return HTMLResponse(PAGE, headers=PAGE_HEADERS)

    @api.get("/v2/health/live")
    async def server_live() -> ServerLive:
        """The server runs."""
        return ServerLive(live=True)

    @api.get("/v2/health/ready")
    async def server_ready() -> ServerReady:
        """Every model is loaded: a server with one that is not gets no requests."""
        return ServerReady(ready=True)

    @api.get("/v2")
    async def server_metadata() -> ServerMetadata:
        """Name and version of the server."""
        return endpoint.metadata

    @api.post("/v2/repository/index")
    async def repository_index(request: Request) -> list[ModelIndex]:
        """Every model that is served, and its version."""
        parse_body(IndexRequest, await read_body(request.receive))
        return endpoint.index

    @api.post("/v2/repository/models/{name}/load")
    async def load(name: str, request: Request) -> Response:
        """Nothing to do, if the model is served."""
        parse_body(LoadRequest, await read_body(request.receive))
        endpoint.load(name)
        return Response()

    @api.post("/v2/repository/models/{name}/unload")
    async def unload(name: str, request: Request) -> Response:
        """Refused: models are deployed for all replicas at once."""
        parse_body(UnloadRequest, await read_body(request.receive))
        endpoint.unload(name)
        return Response()

    @api.get("/v2/models/stats")
    async def all_statistics() -> Statistics:
        """What every model has done since it was loaded."""
        return Statistics(model_stats=endpoint.statistics())

    @api.get("/v2/models/{name}/stats")
    @api.get("/v2/models/{name}/versions/{version}/stats")
    async def statistics(name: str, version: str | None = None) -> Statistics:
        """What every version of a model, or one, has done since it was loaded."""
        return Statistics(model_stats=endpoint.statistics(name, version))

    @api.get("/v2/models/{name}/config")
    @api.get("/v2/models/{name}/versions/{version}/config")
    async def config(name: str, version: str | None = None) -> dict[str, Any]:
        """How a model is configured, in Triton's words."""
        return config_json(model_config(endpoint.find(name, version).model.manifest))

    @api.get("/v2/models/{name}/ready")
    @api.get("/v2/models/{name}/versions/{version}/ready")
    async def model_ready(name: str, version: str | None = None) -> ModelReady:
        """The model is loaded."""
        endpoint.find(name, version)
        return ModelReady(name=name, ready=True)

    @api.get("/v2/models/{name}")
    @api.get("/v2/models/{name}/versions/{version}")
    async def model_metadata(name: str, version: str | None = None) -> ModelMetadata:
        """What a model takes and gives."""
        return endpoint.model_metadata(name, version)

    @api.get("/v1/models")
    async def models() -> list[NaturalModel]:
        """What people can ask: every model, what it takes, and its labels."""
        return [each.natural for each in endpoint.models]

    @api.post("/v1/models/{name}/predict", response_model_exclude_none=True, openapi_extra=_PREDICT_BODY)
    async def predict(name: str, request: Request) -> PredictResponse:
        """A text, an image, or a list of texts or base64 images in; labels with scores out."""
        body = await read_body(request.receive, LIMITS.json_bytes)
        is_image = request.headers.get("content-type", "").lower().startswith("image/")
        asked = PredictRequest(inputs=body) if is_image else parse_body(PredictRequest, body)
        return await endpoint.route(name).predict(asked)

    return api
