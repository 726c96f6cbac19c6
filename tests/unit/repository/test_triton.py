"""What Triton is told of a model, read by the message that Triton reads."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from pydantic import ValidationError
from tritonclient.grpc.model_config_pb2 import (
    TYPE_BF16,
    TYPE_BOOL,
    TYPE_FP16,
    TYPE_FP32,
    TYPE_INT64,
    ModelConfig,
    ModelInstanceGroup,
)
from upath import UPath

from app.engines.base import ShapeProfile
from app.repository.manifest import ModelCard, ServingDefaults
from app.repository.repository import Repository
from app.tensors import Tensor
from tests.publishing import CARD, files_in
from tests.wording import refused


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(UPath(tmp_path / "storage"))


def publish(repository: Repository, tmp_path: Path, card: ModelCard) -> int:
    version = len(repository.versions("toy")) + 1 if repository.names() else 1
    return repository.publish("toy", files_in(tmp_path / f"files{version}"), card).version


def config_in(folder: UPath) -> ModelConfig:
    return text_format.Parse((folder / "config.pbtxt").read_text(encoding="utf-8"), ModelConfig())


def card(engine: str = "openvino", device: str = "cpu", precision: str = "fp32", **fields: object) -> ModelCard:
    key = CARD.engine_key.model_copy(update={"engine": engine, "device": device, "precision": precision})
    return CARD.model_copy(update={"engine_key": key, **fields})


def test_the_configuration_says_what_the_manifest_does(repository: Repository, tmp_path: Path) -> None:
    publish(repository, tmp_path, CARD)
    config = config_in(repository.folder("toy", 1).parent)
    assert (config.name, config.backend, config.default_model_filename) == ("toy", "openvino", "model.onnx")
    assert [(tensor.name, tensor.data_type, tensor.dims) for tensor in config.input] == [
        ("input_ids", TYPE_INT64, [-1])
    ]
    assert [(output.name, output.data_type, output.dims) for output in config.output] == [("logits", TYPE_FP32, [2])]
    assert config.max_batch_size == 32
    assert config.dynamic_batching.preferred_batch_size == [8, 16]
    assert config.dynamic_batching.max_queue_delay_microseconds == 2000
    (group,) = config.instance_group
    assert (group.count, group.kind, group.profile) == (2, ModelInstanceGroup.KIND_CPU, [])
    assert config.parameters["INFERENCE_NUM_THREADS"].string_value == "1"
    assert config.parameters["ENABLE_BATCH_PADDING"].string_value == "YES"
    assert "HINT_BF16" not in config.parameters


def test_openvino_is_told_of_bf16(repository: Repository, tmp_path: Path) -> None:
    publish(repository, tmp_path, card(precision="bf16"))
    assert config_in(repository.folder("toy", 1).parent).parameters["HINT_BF16"].string_value == "YES"


@pytest.mark.parametrize(
    ("engine", "device", "platform", "file", "kind"),
    [
        ("onnxruntime", "cpu", "onnxruntime_onnx", "model.onnx", ModelInstanceGroup.KIND_CPU),
        ("onnxruntime", "gpu", "onnxruntime_onnx", "model.onnx", ModelInstanceGroup.KIND_GPU),
        ("tensorrt", "gpu", "tensorrt_plan", "model.plan", ModelInstanceGroup.KIND_GPU),
    ],
)
def test_every_engine_has_its_backend(
    repository: Repository, tmp_path: Path, engine: str, device: str, platform: str, file: str, kind: int
) -> None:
    publish(repository, tmp_path, card(engine, device))
    config = config_in(repository.folder("toy", 1).parent)
    assert (config.backend, config.platform, config.default_model_filename) == (engine, platform, file)
    assert [group.kind for group in config.instance_group] == [kind]


@pytest.mark.parametrize(
    ("lengths", "most", "names"),
    [((16, 64), 32, ["0", "1", "2", "3", "4", "5"]), ((), 5, ["0", "1", "2"]), ((), 4, ["0", "1"])],
)
def test_a_plan_is_run_with_every_profile_that_takes_as_many_rows(
    repository: Repository, tmp_path: Path, lengths: tuple[int, ...], most: int, names: list[str]
) -> None:
    plan = card("tensorrt", "gpu")
    profile = ShapeProfile(batch_sizes=(1, 4, 32), lengths=lengths)
    key = plan.engine_key.model_copy(update={"profile": profile})
    serving = ServingDefaults(max_batch_size=most, timeout_us=0, replicas=1, threads=1)
    publish(repository, tmp_path, plan.model_copy(update={"engine_key": key, "serving": serving}))
    (group,) = config_in(repository.folder("toy", 1).parent).instance_group
    assert group.profile == names


def test_every_kind_of_tensor_can_be_said(repository: Repository, tmp_path: Path) -> None:
    inputs = (
        Tensor(name="mask", dtype="bool", shape=(-1,)),
        Tensor(name='a "name" \\ 名', dtype="bfloat16", shape=(-1, 3, 8)),
        Tensor(name="half", dtype="float16", shape=(-1, 1)),
    )
    publish(repository, tmp_path, card(inputs=inputs))
    said = config_in(repository.folder("toy", 1).parent).input
    assert [(item.name, item.data_type, list(item.dims)) for item in said] == [
        ("mask", TYPE_BOOL, [1]),
        ('a "name" \\ 名', TYPE_BF16, [3, 8]),
        ("half", TYPE_FP16, [1]),
    ]
    assert [item.HasField("reshape") for item in said] == [True, False, False]


def test_a_model_with_a_fixed_batch_is_not_batched(repository: Repository, tmp_path: Path) -> None:
    publish(repository, tmp_path, card(outputs=(Tensor(name="logits", dtype="float32", shape=(4, 2)),)))
    config = config_in(repository.folder("toy", 1).parent)
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    assert (config.input[0].dims, config.output[0].dims) == ([-1, -1], [4, 2])


def test_the_configuration_follows_production(repository: Repository, tmp_path: Path) -> None:
    def shown() -> tuple[list[int], str]:
        config = config_in(repository.folder("toy", 1).parent)
        return list(config.version_policy.specific.versions), config.backend

    publish(repository, tmp_path, card("onnxruntime"))
    assert shown() == ([1], "onnxruntime")
    publish(repository, tmp_path, CARD)
    assert shown() == ([2], "openvino"), "nothing is in production: the newest"
    repository.promote("toy", 1)
    publish(repository, tmp_path, CARD)
    assert shown() == ([1], "onnxruntime")
    repository.promote("toy", 3)
    assert shown() == ([3], "openvino")
    repository.rollback("toy")
    assert shown() == ([1], "onnxruntime")
    publish(repository, tmp_path, card("torch"))
    repository.promote("toy", 4)
    assert not (repository.folder("toy", 1).parent / "config.pbtxt").exists(), "Triton does not run it"


def test_a_changed_configuration_is_found_and_written_anew(repository: Repository, tmp_path: Path) -> None:
    publish(repository, tmp_path, CARD)
    repository.promote("toy", 1)
    config = repository.folder("toy", 1).parent / "config.pbtxt"
    config.write_text(config.read_text(encoding="utf-8").replace("32", "64"), encoding="utf-8")
    with refused("pointer.changed"):
        repository.verify_config("toy")
    repository.promote("toy", 1)
    repository.verify_config("toy")


def test_an_exported_model_is_whole_and_alone(repository: Repository, tmp_path: Path) -> None:
    publish(repository, tmp_path, CARD)
    publish(repository, tmp_path, CARD)
    repository.promote("toy", 2)
    target = UPath(tmp_path / "triton")
    model = repository.export_to_triton("toy", 1, target)
    assert sorted(str(file.relative_to(tmp_path / "triton")) for file in (tmp_path / "triton").rglob("*")) == [
        *("toy", "toy/1", "toy/1/labels.json", "toy/1/model.onnx", "toy/config.pbtxt")
    ]
    assert config_in(model).version_policy.specific.versions == [1], "not the one in production"
    with refused("folder.taken"):
        repository.export_to_triton("toy", 2, target)


def test_nothing_damaged_and_nothing_that_triton_cannot_run_is_exported(repository: Repository, tmp_path: Path) -> None:
    publish(repository, tmp_path, card("torch"))
    with refused("triton.engine"):
        repository.export_to_triton("toy", 1, UPath(tmp_path / "triton"))
    publish(repository, tmp_path, CARD)
    (repository.folder("toy", 2) / "model.onnx").write_bytes(b"a modeL")
    with refused("version.changed"):
        repository.export_to_triton("toy", 2, UPath(tmp_path / "triton"))
    assert not (tmp_path / "triton").exists() or not list((tmp_path / "triton").iterdir())


def test_a_preferred_batch_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"preferred_batch_sizes are \[64\]: expected 32"):
        ServingDefaults(max_batch_size=32, preferred_batch_sizes=(64,), timeout_us=0, replicas=1, threads=1)
