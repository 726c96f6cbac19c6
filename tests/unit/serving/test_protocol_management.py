"""What is asked of a server beside inference, in JSON and in gRPC's messages."""

from pathlib import Path

import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict, ParseDict
from pydantic import BaseModel
from tritonclient.grpc import service_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig
from upath import UPath

from app.repository.repository import Repository
from app.serving.batching.scheduler import BatchingPolicy
from app.serving.protocol import grpc_management as grpc
from app.serving.protocol import management
from app.serving.protocol.management import parse_body
from app.serving.protocol.model_config import config_json, model_config
from app.serving.protocol.predict import PredictRequest
from app.tensors import TensorSpec
from tests.publishing import CARD, files_in
from tests.wording import refused

DURATION = management.StatisticDuration(count=2, ns=30)
STATISTICS = management.Statistics(
    model_stats=[
        management.ModelStatistics(
            name="m",
            version="3",
            last_inference=1700000000000,
            inference_count=5,
            execution_count=2,
            inference_stats=management.InferenceStatistics(success=DURATION, queue=DURATION),
            batch_stats=[management.BatchStatistics(batch_size=4, compute_infer=DURATION)],
        )
    ]
)
METADATA = management.ModelMetadata(
    name="m",
    versions=["2", "3"],
    platform="onnxruntime_onnx",
    inputs=[management.TensorMetadata.of(TensorSpec("x", np.dtype(np.float32), (-1, 8)))],
    outputs=[management.TensorMetadata.of(TensorSpec("y", np.dtype(np.object_), (-1,)))],
)
INDEX = [
    management.ModelIndex(name="a", version="1", state="READY"),
    management.ModelIndex(name="b", state="UNAVAILABLE", reason="unloaded"),
]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (management.ServerMetadata(version="1.2"), grpc.write_server_metadata),
        (METADATA, grpc.write_model_metadata),
        (STATISTICS, grpc.write_statistics),
    ],
    ids=lambda model: type(model).__name__ if isinstance(model, BaseModel) else "",
)
def test_json_and_messages_say_the_same(said: BaseModel, message: object) -> None:
    written = message(said)
    # ``invalid_count`` and ``generation`` are only in JSON.
    assert written == ParseDict(said.model_dump(), type(written)(), ignore_unknown_fields=True)
    read = MessageToDict(written, preserving_proto_field_name=True, unquote_int64_if_possible=True)
    assert type(said).model_validate(read) == said


def test_the_index_is_a_list_in_json_and_models_in_a_message() -> None:
    read = MessageToDict(grpc.write_index(INDEX), preserving_proto_field_name=True)["models"]
    assert [management.ModelIndex.model_validate(item) for item in read] == INDEX


def test_tensors_are_described_in_the_protocols_words() -> None:
    assert METADATA.inputs[0].model_dump() == {"name": "x", "datatype": "FP32", "shape": [-1, 8]}
    assert METADATA.outputs[0].datatype == "BYTES"


def test_the_repository_is_asked_alike() -> None:
    assert parse_body(management.IndexRequest, b"{}") == management.IndexRequest(ready=False)
    assert parse_body(management.IndexRequest, b'{"ready": true}') == grpc.read_index(
        service_pb2.RepositoryIndexRequest(ready=True)
    )
    assert parse_body(management.LoadRequest, b"{}") == grpc.read_load(service_pb2.RepositoryModelLoadRequest())
    unload = service_pb2.RepositoryModelUnloadRequest(parameters={"unload_dependents": {"bool_param": False}})
    body = b'{"parameters": {"unload_dependents": false}}'
    assert parse_body(management.UnloadRequest, body) == grpc.read_unload(unload)


@pytest.mark.parametrize("model", [management.IndexRequest, management.LoadRequest, management.UnloadRequest])
def test_an_empty_body_asks_for_nothing_special(model: type[BaseModel]) -> None:
    assert parse_body(model, b"") == model()


@pytest.mark.parametrize(
    ("model", "body", "rule", "key"),
    [
        (management.IndexRequest, b'{"raedy": true}', "key.unknown", "raedy"),
        (management.IndexRequest, b'{"ready": "yes"}', "key.type", "ready"),
        (management.LoadRequest, b'{"parameter": {}}', "key.unknown", "parameter"),
        (
            management.UnloadRequest,
            b'{"parameters": {"unload_dependent": false}}',
            "key.unknown",
            "parameters.unload_dependent",
        ),
    ],
)
def test_what_the_repository_does_not_know_is_refused(model: type[BaseModel], body: bytes, rule: str, key: str) -> None:
    with refused(rule, key):
        parse_body(model, body)


def test_what_the_repository_does_not_do_is_refused() -> None:
    config = service_pb2.RepositoryModelLoadRequest(parameters={"config": {"string_param": "{}"}})
    with refused("parameter.unsupported", "parameters"):
        grpc.read_load(config)
    with refused("parameter.unsupported", "parameters"):
        parse_body(management.LoadRequest, b'{"parameters": {"file:1/model.onnx": "AAAA"}}')
    with refused("key.type", "parameters.unload_dependents"):
        parse_body(management.UnloadRequest, b'{"parameters": {"unload_dependents": true}}')
    for read, request in (
        (grpc.read_index, service_pb2.RepositoryIndexRequest(repository_name="other")),
        (grpc.read_load, service_pb2.RepositoryModelLoadRequest(repository_name="other")),
        (grpc.read_unload, service_pb2.RepositoryModelUnloadRequest(repository_name="other")),
    ):
        with refused("repository.unknown"):
            read(request)


@pytest.mark.parametrize("engine", ["openvino", "torch"])
def test_a_configuration_is_that_of_the_version_for_every_engine(engine: str, tmp_path: Path) -> None:
    repository = Repository(UPath(tmp_path / "storage"))
    key = CARD.engine_key.model_copy(update={"engine": engine})
    manifest = repository.publish("toy", files_in(tmp_path / "files"), CARD.model_copy(update={"engine_key": key}))
    policy = BatchingPolicy(8, (4,), 0.003, priority_levels=3, default_priority=2, queue_limit=9, default_timeout_s=2)
    message = model_config(manifest, policy)
    said = config_json(message)
    assert (said["name"], said["backend"], said["max_batch_size"]) == ("toy", engine, 8)
    assert said["input"][0]["dims"] == [-1]
    batching = said["dynamic_batching"]
    assert (batching["preferred_batch_size"], batching["max_queue_delay_microseconds"]) == ([4], 3000)
    assert (batching["priority_levels"], batching["default_priority_level"]) == (3, 2)
    queue = batching["default_queue_policy"]
    assert (queue["max_queue_size"], queue["default_timeout_microseconds"], queue["timeout_action"]) == (
        9,
        2_000_000,
        "REJECT",
    )
    assert said["version_policy"]["specific"]["versions"] == [1]
    assert ParseDict(said, ModelConfig()) == message


@pytest.mark.parametrize(
    ("body", "rule", "key"),
    [
        (b"", "json.invalid", None),
        pytest.param(b"[" * 100_000, "json.invalid", None, id="deep"),
        (b"\xff", "json.invalid", None),
        (b"[]", "key.type", None),
        (b'{"inputs": 3}', "key.type", "inputs"),
        (b'{"inputs": {"a": NaN}}', "key.type", "inputs"),
        (b'{"inputs": ["x", null]}', "key.type", "inputs.1"),
        (b'{"input": "x"}', "key.unknown", "input"),
        (b'{"inputs": "x", "model": 1}', "key.unknown", "model"),
        (b'{"inputs": "x", "priority": -1}', "key.type", "priority"),
        (b"{}", "key.missing", "inputs"),
    ],
)
def test_bodies_that_are_no_request_are_refused(body: bytes, rule: str, key: str | None) -> None:
    with refused(rule, key):
        parse_body(PredictRequest, body)


def test_where_no_key_is_required_none_is_asked_for() -> None:
    with refused("json.invalid"):
        parse_body(management.IndexRequest, b"no JSON")
