"""Rayloom's endpoint in this process, behind the HTTP server of a replica, with a language model.

python -m benchmarks.generation.endpoint CACHE_MB MATERIAL [STORAGE] serves float32, beside the models of a storage. It
prints the port, and serves until its standard input ends.
"""

import asyncio
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvicorn
from upath import UPath

from app.checksums import sha256_of_file
from app.compile.generation.architectures import CacheShape
from app.config import ComputePrecision, ServeConfig
from app.engines.architecture import architecture_of
from app.engines.base import ShapeProfile
from app.ports import LOOPBACK
from app.repository.manifest import (
    GENERATION_FILE,
    EngineKey,
    Generation,
    GreedyAgreement,
    Lineage,
    Manifest,
    ModelCard,
    ServingDefaults,
)
from app.repository.repository import Repository
from app.serving.batching.scheduler import BatchingPolicy
from app.serving.config import DeployedGenerator, DeployedModel, EndpointConfig, GeneratorConfig, VersionConfig
from app.serving.endpoint import Endpoint
from app.serving.transport.http import HttpApi
from app.serving.transport.inference_call import Admission
from app.storage import to_path
from app.tensors import OUTPUT, Tensor
from benchmarks.generation.material import LENGTH, VOCABULARY, Material


def publish(material: Material, storage: UPath, precision: ComputePrecision) -> Manifest:
    """Publish a compiled model under the name of its precision. It is not judged, because its weights are random."""
    from transformers import AutoConfig

    files = material.compiled(precision)
    key = EngineKey(
        onnx_sha256=sha256_of_file(files / GENERATION_FILE),
        precision=precision,
        engine="openvino_genai",
        engine_version="not checked",
        device="cpu",
        architecture=architecture_of("cpu", precision),
        profile=ShapeProfile(batch_sizes=(1,), lengths=(LENGTH,)),
    )
    card = ModelCard(
        task="language-modeling",
        engine_key=key,
        lineage=Lineage(
            compile_run="none",
            recipe="none",
            data_fingerprint="none",
            code="none",
        ),
        inputs=(Tensor(name="input_ids", dtype="int64", shape=(-1, -1)),),
        outputs=(Tensor(name=OUTPUT, dtype="float32", shape=(-1, -1, VOCABULARY)),),
        serving=ServingDefaults(max_batch_size=1, timeout_us=0, replicas=1, threads=1),
        scores=None,
        max_difference=0.0,
        cosine=1.0,
        generation=Generation(
            context_length=LENGTH,
            vocab_size=VOCABULARY,
            end_ids=(0,),
            has_chat=False,
            cache_bytes_per_token=CacheShape.of(AutoConfig.from_pretrained(material.transformers)).bytes_per_token,
            greedy=GreedyAgreement(prompts=1, tokens=1, equal_prompts=1),
        ),
    )
    return Repository(storage).publish(precision, to_path(str(files)), card)


def serve_in_thread(
    folder: Path,
    material: Material,
    precision: ComputePrecision,
    cache_mb: int = 1024,
    models: Mapping[str, DeployedModel] | None = None,
) -> int:
    """Serve a model until the process ends, and return the port. Prompts never share a cache.

    Args:
        folder: an empty folder for the version.
        cache_mb: memory for keys and values.
        models: other models to serve beside it.
    """
    storage = to_path(str(folder))
    manifest = publish(material, storage, precision)
    serve = ServeConfig.model_validate({"generation": {"prefix_cache": False, "cache_mb": cache_mb}})
    version = GeneratorConfig.of(str(storage), manifest, serve)
    deployed = DeployedGenerator(production=version)
    loop, endpoint, admission = asyncio.new_event_loop(), None, None
    threading.Thread(target=loop.run_forever, daemon=True).start()
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind((LOOPBACK, 0))

    async def start() -> None:
        nonlocal endpoint, admission
        endpoint = Endpoint()
        admission = Admission(endpoint)
        await endpoint.update(EndpointConfig(models=dict(models or {}), generators={precision: deployed}))
        api = HttpApi(admission)
        config = uvicorn.Config(api.in_front_of(api), http="httptools", log_config=None, lifespan="off")
        loop.create_task(uvicorn.Server(config).serve([listener]))

    asyncio.run_coroutine_threadsafe(start(), loop).result(120)
    port: int = listener.getsockname()[1]
    return port


@dataclass(frozen=True)
class Served:
    """An endpoint in a process of its own, with the engine in another one."""

    port: int
    process: psutil.Process

    @property
    def engine(self) -> psutil.Process:
        """The process of the engine."""
        (engine,) = (child for child in self.process.children() if "serve" in child.cmdline())
        return engine


@contextmanager
def served(material: Material, cache_mb: int, storage: UPath | None = None) -> Iterator[Served]:
    """Run this module until the end of the block, with the models of a storage beside the language model."""
    arguments = [str(cache_mb), str(material.folder.absolute()), *([str(storage)] if storage else [])]
    command = [sys.executable, "-m", "benchmarks.generation.endpoint", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if not (line := process.stdout.readline()):
            raise RuntimeError("the endpoint did not start")
        yield Served(int(line), psutil.Process(process.pid))
        process.stdin.close()


def models_in(storage: UPath) -> dict[str, DeployedModel]:
    """Return the models in production of a storage, each with one thread."""
    repository, found = Repository(storage), {}
    for name in repository.names():
        manifest = repository.manifest(name, repository.production(name))
        policy = BatchingPolicy(max_batch_size=manifest.serving.max_batch_size, queue_limit=256)
        version = VersionConfig(
            storage=str(storage), name=name, version=manifest.version, seal=manifest.seal, threads=1, policy=policy
        )
        found[name] = DeployedModel(production=version)
    return found


def main() -> None:
    """Serve until standard input ends."""
    _, cache_mb, material, *storages = sys.argv
    models = models_in(to_path(storages[0])) if storages else {}
    with tempfile.TemporaryDirectory(prefix="generation-endpoint-") as folder:
        print(serve_in_thread(Path(folder), Material(Path(material)), "fp32", int(cache_mb), models), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
