"""All routes of the HTTP endpoint except inference: health, metadata, the repository, natural input and pages."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException

from app.errors import NotServedError, RayloomError, short_repr
from app.pages.assets import STYLE, page_headers
from app.repository.manifest import Manifest
from app.serving.endpoint import Endpoint
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
from app.serving.protocol.openai.embeddings import EmbeddingsRequest, EmbeddingsResponse
from app.serving.protocol.openai.models import Model, ModelList, parse_name
from app.serving.protocol.predict import ModelDescription, PredictRequest, PredictResponse
from app.serving.traffic import Protocol
from app.serving.transport.asgi import read_body, unless_gone
from app.serving.transport.errors import ErrorResponse, error_response
from app.serving.transport.inference_call import Admission, InferenceCall
from app.serving.transport.openapi import EMBEDDINGS, PREDICT, describe
from app.tensors import TensorSpec

Result = TypeVar("Result")

_LISTED = "GET /v1/models lists those that do, and GET /v1/predict those that take natural input"
DOCS_ASSETS = "/docs/assets"
"""The path of the scripts and styles of ``/docs``."""
OPEN_PATHS = ("/", "/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready")
"""The paths that need no token: health, for load balancers, and pages without data."""


def routes(admission: Admission) -> FastAPI:
    """Return the application. Its documentation at ``/docs`` loads nothing from other servers."""
    endpoint = admission.endpoint
    api = FastAPIOffline(
        title="Rayloom",
        version=endpoint.metadata.version,
        description="Open Inference Protocol v2, OpenAI's protocol, and natural input for people",
        static_url=DOCS_ASSETS,
        docs_url=None,
        redoc_url=None,
    )

    # Starlette raises an error again after the handler of Exception, so expected errors have their own.
    @api.exception_handler(RayloomError)
    @api.exception_handler(TimeoutError)
    @api.exception_handler(Exception)
    async def _rayloom_error(request: Request, error: Exception) -> ErrorResponse:
        return error_response(error, getattr(request.state, "traceparent", None), request.scope["path"])

    @api.exception_handler(HTTPException)
    async def _http_error(request: Request, error: HTTPException) -> ErrorResponse:
        unknown = f"no {request.method} {request.scope['path']} here: see /docs"
        detail = unknown if error.detail == "Not Found" else error.detail
        return ErrorResponse(detail, error.status_code, error.headers, request.scope["path"])

    @api.get("/", include_in_schema=False)
    async def page() -> Response:
        """The page with the models, and a form to try one."""
        return HTMLResponse(PAGE, headers=PAGE_HEADERS)

    @api.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """The page that describes the routes, and tries them."""
        return HTMLResponse(DOCS, headers=DOCS_HEADERS)

    for router in (
        _predict(admission),
        _openai(admission),
        _server(endpoint),
        _models(endpoint),
        _repository(admission),
    ):
        api.include_router(router)
    describe(api, lambda: endpoint.access.needs_token, OPEN_PATHS)
    return api


def _predict(admission: Admission) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["natural input"])

    @router.get("/predict")
    async def models() -> list[ModelDescription]:
        """List the models with natural input, and their labels."""
        return [listed for served in admission.endpoint.models if (listed := served.description)]

    @router.post(
        "/models/{name}/predict",
        response_model=PredictResponse,
        response_model_exclude_none=True,
        openapi_extra=PREDICT,
    )
    async def predict(name: str, request: Request, response: Response) -> PredictResponse:
        """Classify a text, an image, or a list of texts or base64 images."""
        return await answer(name, None, request, response)

    @router.post(
        "/models/{name}/versions/{version}/predict",
        response_model=PredictResponse,
        response_model_exclude_none=True,
        openapi_extra=PREDICT,
    )
    async def predict_by_version(name: str, version: str, request: Request, response: Response) -> PredictResponse:
        """Classify with one version of a model."""
        return await answer(name, version, request, response)

    async def answer(name: str, version: str | None, request: Request, response: Response) -> PredictResponse:
        with _counted(admission, request, response) as call:
            # A model that is not served is refused before the body is read.
            given, target = await call.route(name, version, lambda _: _read_predict(call, request))
            return await unless_gone(request.receive, call.run(target.predict(given)))

    return router


def _openai(admission: Admission) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["OpenAI"])

    @router.get("/models")
    async def models() -> ModelList:
        """List the models that answer OpenAI's requests: those that generate text, and those that answer vectors."""
        return ModelList(data=_openai_models(admission.endpoint))

    @router.get("/models/{name}")
    @router.get("/models/{name}/{version}")
    async def model(name: str, version: str | None = None) -> Model:
        """Return a model, NAME or NAME/VERSION, that answers OpenAI's requests."""
        await admission.endpoint.load_on_demand(name)
        manifest = _openai_manifest(admission.endpoint, name, version)
        return Model.of(name if version is None else f"{name}/{version}", manifest)

    @router.post("/embeddings", response_model=EmbeddingsResponse, openapi_extra=EMBEDDINGS)
    async def embeddings(request: Request, response: Response) -> EmbeddingsResponse:
        """Return the vectors of texts, in OpenAI's format."""
        with _counted(admission, request, response, "openai") as call:
            given = await _read_json(call, request, EmbeddingsRequest)

            async def read(_: Sequence[TensorSpec]) -> PredictRequest:
                return given.as_predict()

            texts, target = await call.route(*parse_name(given.model), read)
            answered = await unless_gone(request.receive, call.run(target.predict(texts)))
            return EmbeddingsResponse.of(given, answered)

    return router


def _openai_models(endpoint: Endpoint) -> list[Model]:
    production = {name: rollout.find(None).model for name, rollout in endpoint.rollouts.items()}
    manifests = {name: model.manifest for name, model in production.items() if model.answers_vectors}
    manifests |= {name: rollout.find(None).manifest for name, rollout in endpoint.generators.items()}
    return [Model.of(name, manifest) for name, manifest in sorted(manifests.items())]


def _openai_manifest(endpoint: Endpoint, name: str, version: str | None) -> Manifest:
    """Return the version of a model that OpenAI's routes answer with. Raises NotServedError if there is none."""
    if generator := endpoint.generators.get(name):
        return generator.find(version).manifest
    model = endpoint.find(name, version).model
    if not model.answers_vectors:
        raise NotServedError(f"model {short_repr(name)} answers no request of OpenAI's: {_LISTED}")
    return model.manifest


@contextmanager
def _counted(
    admission: Admission, request: Request, response: Response, protocol: Protocol = "natural"
) -> Iterator[InferenceCall]:
    """Count and trace the request that is answered in the block. Its caller was checked, and Serve gave it a slot."""
    call = InferenceCall(admission, protocol)
    with call.counted():
        call.begin_trace(request.headers.get("traceparent"))
        if call.traceparent:
            response.headers["traceparent"] = request.state.traceparent = call.traceparent
        yield call


async def _read_predict(call: InferenceCall, request: Request) -> PredictRequest:
    """Read an image or JSON, as ``_read``."""
    if request.headers.get("content-type", "").lower().startswith("image/"):
        return await _read(call, request, lambda content: PredictRequest(inputs=content))
    return await _read_json(call, request, PredictRequest)


async def _read_json(call: InferenceCall, request: Request, model: type[Body]) -> Body:
    """Read a JSON body, as ``_read``."""
    return await _read(call, request, partial(parse_body, model))


async def _read(call: InferenceCall, request: Request, parse: Callable[[bytes], Result]) -> Result:
    """Read, decompress and parse a body. Note its size as it was sent. Raises RequestError."""
    reader, encoding = call.admission.endpoint.reader, request.headers.get("content-encoding", "")
    body = await read_body(request.headers, request.receive)
    call.received = len(body)
    content = await reader.inflate(body, encoding, LIMITS.json_bytes)
    return await reader.read(len(content), lambda: parse(content), len(body))


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
    @router.get("/stats", response_model_exclude_none=True)
    async def all_statistics() -> Statistics:
        """Return the statistics of all models."""
        return Statistics(model_stats=endpoint.statistics())

    @router.get("/{name}/stats", response_model_exclude_none=True)
    @router.get("/{name}/versions/{version}/stats", response_model_exclude_none=True)
    async def statistics(name: str, version: str | None = None) -> Statistics:
        """Return the statistics of a model's versions, or of one version."""
        return Statistics(model_stats=endpoint.statistics(name, version))

    @router.get("/{name}/config")
    @router.get("/{name}/versions/{version}/config")
    async def config(name: str, version: str | None = None) -> dict[str, Any]:
        """Return a model's configuration in Triton's format."""
        await endpoint.load_on_demand(name)
        served = endpoint.find(name, version)
        return config_json(model_config(served.model.manifest, served.policy))

    @router.get("/{name}/ready")
    @router.get("/{name}/versions/{version}/ready")
    async def model_ready(name: str, version: str | None = None) -> ModelReady:
        """Return true if the model answers, be it that the next request loads it."""
        endpoint.require_deployed(name, version)
        return ModelReady(name=name, ready=True)

    @router.get("/{name}")
    @router.get("/{name}/versions/{version}")
    async def model_metadata(name: str, version: str | None = None) -> ModelMetadata:
        """Return the inputs and outputs of a model."""
        await endpoint.load_on_demand(name)
        return endpoint.model_metadata(name, version)

    return router


def _repository(admission: Admission) -> APIRouter:
    endpoint = admission.endpoint
    router = APIRouter(prefix="/v2/repository", tags=["repository"])

    @router.post("/index")
    async def repository_index(request: Request) -> list[ModelIndex]:
        """List the served models and their versions."""
        given = await _read_json(InferenceCall(admission, None), request, IndexRequest)
        return [model for model in endpoint.index if model.state == "READY" or not given.ready]

    @router.post("/models/{name}/load")
    async def load(name: str, request: Request) -> Response:
        """Do nothing if the model is served."""
        await _read_json(InferenceCall(admission, None), request, LoadRequest)
        await endpoint.load(name)
        return Response()

    @router.post("/models/{name}/unload")
    async def unload(name: str, request: Request) -> Response:
        """Refuse: models are deployed for all replicas at once."""
        await _read_json(InferenceCall(admission, None), request, UnloadRequest)
        endpoint.unload(name)
        return Response()

    return router


_FILES = files("app.serving.transport")

DOCS = (_FILES / "docs.html").read_text(encoding="utf-8")
"""The page at ``/docs``: Swagger UI, light and dark."""

DOCS_HEADERS = page_headers(DOCS)

_SHARED_STYLE = "/* app/pages/style.css */"
_CONVERSATION = "/* app/serving/transport/conversation.js */"

PAGE = (
    (_FILES / "page.html")
    .read_text(encoding="utf-8")
    .replace(_SHARED_STYLE, STYLE)
    .replace(_CONVERSATION, (_FILES / "conversation.js").read_text(encoding="utf-8"))
)
"""The page at ``/``, with its style and script. It calls only the endpoint's own routes."""

PAGE_HEADERS = page_headers(PAGE)
"""Only this script runs, and only with this server. So a label or a model's name cannot inject a script."""
