"""A small text model as jobs.compile would publish it, and files of it that answer otherwise."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from upath import UPath

from app.data.processor import Processor
from app.data.targets import Classes, Outputs
from app.engines.architecture import architecture_of
from app.engines.base import Signature
from app.repository.manifest import ServingDefaults
from app.repository.repository import Repository
from app.repository.score import Score
from app.serving.batching.scheduler import BatchingPolicy
from app.serving.config import DeployedModel, EndpointConfig, VersionConfig
from app.storage import to_path
from app.tensors import OUTPUT, Tensor, Tensors
from tests.engine_contract import PROCESSOR, SIGNATURE, encoder, exported
from tests.jobs import run_job, serve_nothing
from tests.publishing import CARD

LABELS = ["bad", "neither", "good"]


def publish(
    storage: UPath, *models: bytes, key: Mapping[str, str] | None = None, labels: list[str] = LABELS
) -> list[int]:
    """Publish each as the next version of the model 'toy', and return their numbers.

    ``key`` has fields of the engine key, in place of those that are right here.
    """
    return [publish_version(storage, "toy", model, SIGNATURE, PROCESSOR, labels, key) for model in models]


def publish_version(
    storage: UPath,
    name: str,
    model: bytes,
    signature: Signature,
    processor: Processor,
    labels: list[str],
    key: Mapping[str, str] | None = None,
    train_run: str = "t",
    task: str | None = None,
    score: Score | None = CARD.score,
    targets: Outputs | None = None,
    serving: ServingDefaults = CARD.serving,
) -> int:
    """One more version of a model that ONNX Runtime serves. ``targets`` replaces classes with these labels."""
    here = {"engine": "onnxruntime", "engine_version": "of another day", "architecture": architecture_of("cpu", "fp32")}
    card = CARD.model_copy(
        update={
            "task": task or f"{processor.modality}-classification",
            "engine_key": CARD.engine_key.model_copy(update={**here, **(key or {})}),
            "lineage": CARD.lineage.model_copy(update={"train_run": train_run}),
            "inputs": tuple(map(Tensor.of, signature.inputs)),
            "outputs": tuple(map(Tensor.of, signature.outputs)),
            "score": score,
            "serving": serving,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        files = UPath(folder)
        processor.save(files)
        (targets or Classes(labels)).save(files)
        (files / card.engine_key.file).write_bytes(model)
        return Repository(storage).publish(name, files, card).version


def version_config(storage: UPath, version: int, name: str = "toy", **knobs: Any) -> VersionConfig:
    """A version, batched by a policy with these knobs."""
    policy = BatchingPolicy(**{"max_batch_size": 8, "queue_limit": 64, **knobs})
    seal = Repository(to_path(storage)).manifest(name, version).seal
    return VersionConfig(storage=str(storage), name=name, version=version, seal=seal, threads=1, policy=policy)


def endpoint_config(toy: DeployedModel) -> EndpointConfig:
    """One that serves the model 'toy', as it comes out of Ray."""
    return EndpointConfig.model_validate_json(EndpointConfig(models={"toy": toy}).model_dump_json())


def config(storage: UPath, version: int = 1, **knobs: Any) -> EndpointConfig:
    """What serves this version of it alone."""
    return endpoint_config(DeployedModel(production=version_config(storage, version, **knobs)))


def answering(number: float) -> bytes:
    """The model's file, but that each logit is so much more."""
    model = onnx.load_model_from_string(exported())
    (last,) = (node for node in model.graph.node if OUTPUT in node.output)
    last.output[list(last.output).index(OUTPUT)] = "before"
    model.graph.initializer.append(numpy_helper.from_array(np.float32(number), "number"))
    model.graph.node.append(helper.make_node("Add", ["before", "number"], [OUTPUT]))
    return bytes(model.SerializeToString())


def one_column(number: float) -> bytes:
    """Return the model's file with one column: the sum of the logits plus ``number``."""
    model = onnx.load_model_from_string(exported())
    graph = model.graph
    (last,) = (node for node in graph.node if OUTPUT in node.output)
    last.output[list(last.output).index(OUTPUT)] = "before"
    graph.initializer.append(numpy_helper.from_array(np.ones((3, 1), np.float32), "ones"))
    graph.initializer.append(numpy_helper.from_array(np.float32(number), "number"))
    graph.node.append(helper.make_node("MatMul", ["before", "ones"], ["sum"]))
    graph.node.append(helper.make_node("Add", ["sum", "number"], [OUTPUT]))
    graph.output[0].type.tensor_type.shape.dim[1].dim_value = 1
    return bytes(model.SerializeToString())


def expected(tensors: Tensors, number: int = 0) -> NDArray[np.float32]:
    """The logits of ``answering(number)``; 0 is the model itself."""

    with torch.no_grad():
        logits: NDArray[np.float32] = encoder()(
            **{name: torch.from_numpy(array) for name, array in tensors.items()}
        ).numpy()
    return logits + np.float32(number)


def body(tensors: Tensors, **parameters: object) -> dict[str, Any]:
    """Of ``infer``, in JSON."""
    inputs = [
        {"name": name, "shape": list(tensor.shape), "datatype": "INT64", "data": tensor.ravel().tolist()}
        for name, tensor in tensors.items()
    ]
    return {"inputs": inputs, "parameters": parameters}


def asked(library: ModuleType, tensors: Tensors, **options: bool) -> list[Any]:
    """The inputs of one of Triton's clients."""
    inputs = [library.InferInput(name, list(tensor.shape), "INT64") for name, tensor in tensors.items()]
    for input_ in inputs:
        input_.set_data_from_numpy(tensors[input_.name()], **options)
    return inputs


def is_right(answer: Mapping[str, Any], logits: NDArray[np.float32]) -> bool:
    """Whether the JSON of an answer has these logits."""
    (output,) = answer["outputs"]
    return output["shape"] == list(logits.shape) and bool(np.allclose(output["data"], logits.ravel(), atol=1e-4))


@contextmanager
def deployed(cluster: dict[str, str], version: int, *overrides: str) -> Iterator[dict[str, Any]]:
    """Serve a version in a cluster that serves nothing else, until the end; the artifacts of the job."""
    yield deploy(cluster, version, *overrides)
    serve_nothing(cluster)


def deploy(cluster: dict[str, str], version: int, *overrides: str) -> dict[str, Any]:
    """Serve a version from the storage of a running cluster; the artifacts of the job."""
    result = run_job(cluster, "deploy", "recipes/reviews.yaml", "name=toy", f"serve.version={version}", *overrides)
    artifacts: dict[str, Any] = result["artifacts"]
    return artifacts
