"""The model server: the Open Inference Protocol and natural input over HTTP, for every deployed model."""

import asyncio
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from ray import serve
from starlette.exceptions import HTTPException

from app.errors import DataError, RequestError, RequestTooLargeError
from app.serving.batch import infer_together
from app.serving.model import LoadedModel, load_model
from app.serving.protocol.answer import answer, check_outputs
from app.serving.protocol.bodies import parse_body
from app.serving.protocol.limits import Limits
from app.serving.protocol.management import ModelIndex, ModelMetadata, ServerMetadata, TensorMetadata
from app.serving.protocol.natural import PredictRequest, PredictResponse
from app.serving.protocol.rest import read_infer, write_infer
from app.storage import open_storage
from app.tensors import Tensors, check_tensors

MAX_BODY_BYTES = 64 * 2**20
MAX_ROWS = 1024
"""Of a request, which takes several calls of the engine if a call takes fewer."""

RETRY_AFTER_S = 1
_LIMITS = Limits(body_bytes=MAX_BODY_BYTES)
_EXTENSIONS = ("binary_tensor_data", "classification", "parameters")


class ServedModelConfig(BaseModel):
    """One model of the server."""

    storage: str
    version: int
    max_batch_size: int
    timeout_us: int
    queue_limit: int
    threads: int


class ServedModels(BaseModel):
    """Every model of the server, by name."""

    models: dict[str, ServedModelConfig] = {}


class BatchedModel:
    """A loaded model whose waiting requests share calls of its engine."""

    def __init__(self, model: LoadedModel, config: ServedModelConfig) -> None:
        self.model = model
        self.config = config
        self._waiting = 0
        self._batched: Callable[[Tensors], Awaitable[Tensors]] = serve.batch(
            max_batch_size=config.max_batch_size,
            batch_wait_timeout_s=config.timeout_us / 1e6,
        )(self._run)

    async def infer(self, tensors: Tensors) -> Tensors:
        """Run one request among others.

        Raises:
            RequestError: a tensor is not what the model takes.
            HTTPException: 503, as many requests wait as the queue holds.
        """
        specs = self.model.processor.inputs
        check_tensors(tensors, specs)
        if (rows := len(tensors[specs[0].name])) > MAX_ROWS:
            raise RequestError(f"input {specs[0].name!r} has {rows} rows: at most {MAX_ROWS} in one request")
        if self._waiting >= self.config.queue_limit:
            raise HTTPException(
                503, f"{self._waiting} requests wait already: try again later", {"Retry-After": str(RETRY_AFTER_S)}
            )
        self._waiting += 1
        try:
            outputs = await self._batched(tensors)
        finally:
            self._waiting -= 1
        for name, output in outputs.items():
            if not np.isfinite(output).all():
                raise RequestError(
                    f"output {name!r} is not finite for these inputs: give finite numbers, and full rows"
                )
        return outputs

    async def _run(self, requests: list[Tensors]) -> list[Tensors]:
        return await asyncio.to_thread(infer_together, self.model.engine, requests, self.config.max_batch_size)


api = FastAPI(title="Rayloom", version=version("rayloom"), description="Open Inference Protocol v2")


@api.exception_handler(RequestError)
@api.exception_handler(DataError)
async def _bad_request(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": str(error)}, 400)


@api.exception_handler(RequestTooLargeError)
async def _too_large(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": str(error)}, 413)


@api.exception_handler(HTTPException)
async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    detail = f"no {request.method} {request.url.path} here: see /docs" if error.detail == "Not Found" else error.detail
    return JSONResponse({"error": detail}, error.status_code, error.headers)


@api.exception_handler(Exception)
async def _internal_error(_: Request, __: Exception) -> JSONResponse:
    return JSONResponse({"error": "internal error: see the replica's log in the Ray dashboard"}, 500)


async def _read_body(request: Request) -> bytes:
    """The body. Raises HTTPException 413 as soon as it is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    return bytes(body)


@serve.deployment(
    # New replicas start before old ones stop: a version that fails to load leaves the old one serving.
    max_surge_percent=100,
)
@serve.ingress(api)
class ModelServer:
    """A replica; each holds every deployed model."""

    def __init__(self) -> None:
        self._models: dict[str, BatchedModel] = {}
        self._config = ServedModels()

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Load what is new and forget what is gone; on an error, everything stays as it was."""
        config = ServedModels.model_validate(user_config)
        models = {}
        for name, wanted in config.models.items():
            if wanted == self._config.models.get(name):
                models[name] = self._models[name]
            else:
                loaded = await asyncio.to_thread(
                    load_model, open_storage(wanted.storage), name, wanted.version, wanted.threads
                )
                models[name] = BatchedModel(loaded, wanted)
        self._models, self._config = models, config

    async def config(self) -> ServedModels:
        """What this replica serves; asked through a handle when another model is deployed."""
        return self._config

    @api.get("/v2/health/live")
    @api.get("/v2/health/ready")
    async def health(self) -> Response:
        """The server runs, and every model is loaded."""
        return Response()

    @api.get("/v2")
    async def server_metadata(self) -> ServerMetadata:
        """Name and version of the server."""
        return ServerMetadata(version=version("rayloom"), extensions=_EXTENSIONS)

    @api.post("/v2/repository/index")
    async def repository_index(self) -> list[ModelIndex]:
        """Every model that is served, and its version."""
        return [
            ModelIndex(name=name, version=served.model.version, state="READY")
            for name, served in sorted(self._models.items())
        ]

    @api.get("/v2/models/{name}")
    @api.get("/v2/models/{name}/versions/{model_version}")
    async def model_metadata(self, name: str, model_version: str | None = None) -> ModelMetadata:
        """What a model takes and gives."""
        model = self._find(name, model_version).model
        return ModelMetadata(
            name=name,
            versions=[model.version],
            platform=model.platform,
            inputs=[TensorMetadata.of(spec) for spec in model.processor.inputs],
            outputs=[TensorMetadata.of(spec) for spec in model.engine.signature.outputs],
        )

    @api.get("/v2/models/{name}/ready")
    @api.get("/v2/models/{name}/versions/{model_version}/ready")
    async def model_ready(self, name: str, model_version: str | None = None) -> Response:
        """The model is loaded."""
        self._find(name, model_version)
        return Response()

    @api.post("/v2/models/{name}/infer")
    @api.post("/v2/models/{name}/versions/{model_version}/infer")
    async def infer(self, name: str, request: Request, model_version: str | None = None) -> Response:
        """Tensors in, tensors out."""
        served = self._find(name, model_version)
        body, signature = await _read_body(request), served.model.engine.signature
        asked = read_infer(body, request.headers, name, model_version, served.model.processor.inputs, _LIMITS)
        check_outputs(asked, signature.outputs)
        outputs = await served.infer(asked.inputs)
        said = answer(
            asked, served.model.version, outputs, {spec.name: served.model.labels for spec in signature.outputs}
        )
        content, headers = write_infer(said, asked, request.headers.get("accept-encoding", ""))
        return Response(content, headers=headers)

    @api.post("/v1/models/{name}/predict")
    async def predict(self, name: str, request: Request) -> PredictResponse:
        """Texts or base64 images in, labels with scores out."""
        served = self._find(name, None)
        body = parse_body(PredictRequest, await _read_body(request))
        tensors = await asyncio.to_thread(served.model.encode, body.inputs)
        (logits,) = (await served.infer(tensors)).values()
        return PredictResponse(
            model_name=name,
            model_version=served.model.version,
            predictions=served.model.decode(logits),
        )

    def _find(self, name: str, model_version: str | None) -> BatchedModel:
        """The model of a request. Raises HTTPException 404."""
        served = self._models.get(name)
        if served is None:
            known = ", ".join(sorted(self._models)) or "none"
            raise HTTPException(404, f"model {name!r} is not deployed: deployed are {known}")
        serving = served.model.version
        if model_version not in (None, serving):
            raise HTTPException(
                404, f"model {name!r} has no version {model_version!r} here: version {serving} is served"
            )
        return served
