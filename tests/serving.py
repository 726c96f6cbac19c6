"""An endpoint behind real servers on loopback, in a thread of this process, and versions for it to serve."""

import asyncio
import random
import socket
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import uvicorn
from tritonclient.grpc.service_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from upath import UPath

from app.data.classification import save_labels
from app.data.processor import Processor
from app.engines.architecture import architecture_of
from app.engines.base import Signature
from app.repository.repository import Repository
from app.serving.batching.policy import BatchingPolicy
from app.serving.config import DeployedModel, EndpointConfig, VersionConfig
from app.serving.endpoint import Endpoint
from app.serving.grpc import GrpcMethods
from app.serving.http import HttpApi
from app.tensors import Tensor
from tests.engine_contract import PROCESSOR, SIGNATURE
from tests.publishing import CARD

Result = TypeVar("Result")
LABELS = ["bad", "neither", "good"]


def publish(storage: UPath, *models: bytes) -> UPath:
    """Add these ONNX files to a storage as versions of the model 'toy'."""
    for model in models:
        publish_version(storage, "toy", model, SIGNATURE, PROCESSOR, LABELS)
    return storage


def publish_version(
    storage: UPath, name: str, model: bytes, signature: Signature, processor: Processor, labels: list[str]
) -> None:
    """One more version of a model that ONNX Runtime serves."""
    key = {"engine": "onnxruntime", "engine_version": "of another day", "architecture": architecture_of("cpu", "fp32")}
    card = CARD.model_copy(
        update={
            "task": f"{processor.modality}-classification",
            "engine_key": CARD.engine_key.model_copy(update=key),
            "inputs": tuple(map(Tensor.of, signature.inputs)),
            "outputs": tuple(map(Tensor.of, signature.outputs)),
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        files = UPath(folder)
        processor.save(files)
        save_labels(labels, files)
        (files / "model.onnx").write_bytes(model)
        Repository(storage).publish(name, files, card)


def version_config(storage: UPath, version: int, name: str = "toy", **knobs: Any) -> VersionConfig:
    """A version, batched by a policy with these knobs."""
    policy = BatchingPolicy(**{"max_batch_size": 8, "queue_limit": 64, **knobs})
    return VersionConfig(storage=str(storage), name=name, version=version, threads=1, policy=policy)


def endpoint_config(toy: DeployedModel) -> EndpointConfig:
    """One that serves the model 'toy', as it comes out of Ray."""
    return EndpointConfig.model_validate_json(EndpointConfig(models={"toy": toy}).model_dump_json())


@dataclass(frozen=True)
class Server:
    """Where an endpoint answers."""

    endpoint: Endpoint
    http: str
    """``host:port``, as for gRPC."""
    grpc: str
    loop: asyncio.AbstractEventLoop

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """On the endpoint's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)


@contextmanager
def serving(chance: random.Random | None = None) -> Iterator[Server]:
    """Servers for an endpoint that has no models yet."""
    loop, endpoint = asyncio.new_event_loop(), Endpoint(chance)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(HttpApi(endpoint), log_config=None, lifespan="off"))

    async def start() -> tuple[asyncio.Task[None], grpc.aio.Server, int]:
        rpc = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 * 2**20)])
        add_GRPCInferenceServiceServicer_to_server(GrpcMethods(endpoint), rpc)
        port = rpc.add_insecure_port("127.0.0.1:0")
        await rpc.start()
        return asyncio.create_task(server.serve([listener])), rpc, port

    http, rpc, port = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    try:
        yield Server(endpoint, f"127.0.0.1:{listener.getsockname()[1]}", f"127.0.0.1:{port}", loop)
    finally:

        async def stop() -> None:
            server.should_exit = True
            await http
            await rpc.stop(None)

        asyncio.run_coroutine_threadsafe(stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
