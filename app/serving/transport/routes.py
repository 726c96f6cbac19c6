"""All routes of the HTTP endpoint except inference: health, metadata, the repository, natural input and pages."""

from collections.abc import Callable, Coroutine
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response, Security
from fastapi.responses import HTMLResponse
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException

from app.errors import RayloomError
from app.pages.assets import STYLE, page_headers
from app.serving.endpoint import Endpoint
from app.serving.protocol.embeddings import EmbeddingsRequest, EmbeddingsResponse
from app.serving.protocol.infer import LIMITS
from app.serving.protocol.management import (
    Body,
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
    parse_body,
)
from app.serving.protocol.model_config import config_json, model_config
from app.serving.protocol.natural import NaturalModel, PredictRequest, PredictResponse
from app.serving.traffic import Asked
from app.serving.transport.asgi import read_body, unless_gone
from app.serving.transport.errors import ErrorResponse, error_response
from app.serving.transport.openapi import EMBEDDINGS, PREDICT, describe_infer

Result = TypeVar("Result")

DOCS_ASSETS = "/docs/assets"
"""The path of the scripts and styles of ``/docs``."""


def routes(endpoint: Endpoint) -> FastAPI:
    """Return the application. Its documentation at ``/docs`` loads nothing from other servers."""
    api = FastAPIOffline(
        title="Rayloom",
        version=endpoint.metadata.version,
        description="Open Inference Protocol v2, and natural input for people",
        # With this, /docs sends the token, which ``HttpApi`` checks.
        dependencies=[Security(HTTPBearer(auto_error=False))],
        static_url=DOCS_ASSETS,
        redoc_url=None,
    )

    # Starlette raises an error again after the handler of Exception, so expected errors have their own.
    @api.exception_handler(RayloomError)
    @api.exception_handler(TimeoutError)
    @api.exception_handler(Exception)
    async def _rayloom_error(request: Request, error: Exception) -> ErrorResponse:
        return error_response(error, getattr(request.state, "traceparent", None))

    @api.exception_handler(HTTPException)
    async def _http_error(request: Request, error: HTTPException) -> ErrorResponse:
        unknown = f"no {request.method} {request.scope['path']} here: see /docs"
        detail = unknown if error.detail == "Not Found" else error.detail
        return ErrorResponse(detail, error.status_code, error.headers)

    @api.get("/", include_in_schema=False)
    async def page() -> Response:
        """The page with the models, and a form to try one."""
        return HTMLResponse(PAGE, headers=PAGE_HEADERS)

    for router in (
        _natural(endpoint),
        _embeddings(endpoint),
        _server(endpoint),
        _models(endpoint),
        _repository(endpoint),
    ):
        api.include_router(router)
    describe_infer(api)
    return api


def _natural(endpoint: Endpoint) -> APIRouter:
    router = APIRouter(prefix="/v1/models", tags=["natural input"])

    @router.get("")
    async def models() -> list[NaturalModel]:
        """List the models with natural input, and their labels."""
        return [natural for served in endpoint.models if (natural := served.natural)]

    @router.post(
        "/{name}/predict", response_model=PredictResponse, response_model_exclude_none=True, openapi_extra=PREDICT
    )
    async def predict(name: str, request: Request, response: Response) -> PredictResponse | Response:
        """Classify a text, an image, or a list of texts or base64 images."""
        return await answer(name, None, request, response)

    @router.post(
        "/{name}/versions/{version}/predict",
        response_model=PredictResponse,
        response_model_exclude_none=True,
        openapi_extra=PREDICT,
    )
    async def predict_by_version(
        name: str, version: str, request: Request, response: Response
    ) -> PredictResponse | Response:
        """Classify with one version of a model."""
        return await answer(name, version, request, response)

    async def answer(
        name: str, version: str | None, request: Request, response: Response
    ) -> PredictResponse | Response:
        with endpoint.traffic.counted("natural", request.headers.get("traceparent")) as asked:
            if asked.traceparent:
                response.headers["traceparent"] = request.state.traceparent = asked.traceparent
            asked.model, asked.version = name, endpoint.find(name, version).version  # refused before the body is read
            given, asked.received = await _read_predict(endpoint, request)
            # A version can be replaced while the body arrives, and would refuse the request once it is unloaded.
            target = endpoint.route(name, version)
            asked.version = target.version
            return await _unless_gone(request, target.predict(given), asked) or Response()

    return router


def _embeddings(endpoint: Endpoint) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["natural input"])

    @router.post("/embeddings", response_model=EmbeddingsResponse, openapi_extra=EMBEDDINGS)
    async def embeddings(request: Request, response: Response) -> EmbeddingsResponse | Response:
        """Return the vectors of texts, in OpenAI's format."""
        with endpoint.traffic.counted("natural", request.headers.get("traceparent")) as asked:
            if asked.traceparent:
                response.headers["traceparent"] = request.state.traceparent = asked.traceparent
            given, asked.received = await _read_json(endpoint, request, EmbeddingsRequest)
            texts = given.as_predict()
            target = endpoint.route(given.model)
            asked.model, asked.version = given.model, target.version
            answered = await _unless_gone(request, target.predict(texts), asked)
            return EmbeddingsResponse.of(given, answered) if answered else Response()

    return router


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result], asked: Asked) -> Result | None:
    """Return the result of ``work``; None, which nobody reads, if the client disconnects first."""
    result = await unless_gone(request.receive, work)
    if result is None:
        asked.outcome = "cancelled"
    return result


async def _read_predict(endpoint: Endpoint, request: Request) -> tuple[PredictRequest, int]:
    """Read an image or JSON, as ``_read``."""
    if request.headers.get("content-type", "").lower().startswith("image/"):
        return await _read(endpoint, request, lambda content: PredictRequest(inputs=content))
    return await _read_json(endpoint, request, PredictRequest)


async def _read_json(endpoint: Endpoint, request: Request, model: type[Body]) -> tuple[Body, int]:
    """Read a JSON body, as ``_read``."""
    return await _read(endpoint, request, partial(parse_body, model))


async def _read(endpoint: Endpoint, request: Request, parse: Callable[[bytes], Result]) -> tuple[Result, int]:
    """Read, decompress and parse a body. Return it, and its size as it was sent. Raises RequestError."""
    body, encoding = await read_body(request.headers, request.receive), request.headers.get("content-encoding", "")
    content = await endpoint.reader.inflate(body, encoding, LIMITS.json_bytes)
    return await endpoint.reader.read(len(content), lambda: parse(content), len(body)), len(body)


def _server(endpoint: Endpoint) -> APIRouter:
    router = APIRouter(prefix="/v2", tags=["server"])

    @router.get("/health/live")
    async def server_live() -> ServerLive:
        """Return true: the server runs."""
        return ServerLive(live=True)

    @router.get("/health/ready")
    async def server_ready() -> ServerReady:
        """Return true: a server gets no requests before every model is loaded."""
        return ServerReady(ready=True)

    @router.get("")
    async def server_metadata() -> ServerMetadata:
        """Return the name and version of the server."""
        return endpoint.metadata

    return router


def _models(endpoint: Endpoint) -> APIRouter:
    router = APIRouter(prefix="/v2/models", tags=["models"])

    # Before the routes that begin with a name, because the first match answers.
    @router.get("/stats")
    async def all_statistics() -> Statistics:
        """Return the statistics of all models."""
        return Statistics(model_stats=endpoint.statistics())

    @router.get("/{name}/stats")
    @router.get("/{name}/versions/{version}/stats")
    async def statistics(name: str, version: str | None = None) -> Statistics:
        """Return the statistics of a model's versions, or of one version."""
        return Statistics(model_stats=endpoint.statistics(name, version))

    @router.get("/{name}/config")
    @router.get("/{name}/versions/{version}/config")
    async def config(name: str, version: str | None = None) -> dict[str, Any]:
        """Return a model's configuration in Triton's format."""
        served = endpoint.find(name, version)
        return config_json(model_config(served.model.manifest, served.policy))

    @router.get("/{name}/ready")
    @router.get("/{name}/versions/{version}/ready")
    async def model_ready(name: str, version: str | None = None) -> ModelReady:
        """Return true if the model is loaded."""
        endpoint.find(name, version)
        return ModelReady(name=name, ready=True)

    @router.get("/{name}")
    @router.get("/{name}/versions/{version}")
    async def model_metadata(name: str, version: str | None = None) -> ModelMetadata:
        """Return the inputs and outputs of a model."""
        return endpoint.model_metadata(name, version)

    return router


def _repository(endpoint: Endpoint) -> APIRouter:
    router = APIRouter(prefix="/v2/repository", tags=["repository"])

    @router.post("/index")
    async def repository_index(request: Request) -> list[ModelIndex]:
        """List the served models and their versions."""
        # Only checked. All that is listed is ready, so its filter changes nothing.
        await _read_json(endpoint, request, IndexRequest)
        return endpoint.index

    @router.post("/models/{name}/load")
    async def load(name: str, request: Request) -> Response:
        """Do nothing if the model is served."""
        await _read_json(endpoint, request, LoadRequest)
        endpoint.load(name)
        return Response()

    @router.post("/models/{name}/unload")
    async def unload(name: str, request: Request) -> Response:
        """Refuse: models are deployed for all replicas at once."""
        await _read_json(endpoint, request, UnloadRequest)
        endpoint.unload(name)
        return Response()

    return router


_SHARED_STYLE = "/* app/pages/style.css */"

PAGE = files("app.serving.transport").joinpath("page.html").read_text(encoding="utf-8").replace(_SHARED_STYLE, STYLE)
"""The page at ``/``, with its style and script. It calls only the endpoint's own routes."""

PAGE_HEADERS = page_headers(PAGE)
"""Only this script runs, and only with this server. So a label or a model's name cannot inject a script."""
