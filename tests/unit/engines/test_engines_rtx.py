"""Plans of TensorRT for RTX, built ahead of time on a machine without a GPU."""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

from app.checksums import sha256_of
from app.compile.export import export_onnx
from app.compile.quantization.search import Verdict, find_quantization
from app.config import ComputePrecision
from app.engines.base import ShapeProfile
from app.engines.registry import installed_engines, open_engine
from app.engines.tensorrt.build import build_plan, builder_config
from app.engines.tensorrt.engine import runtime_config
from app.engines.tensorrt.library import load_library
from app.engines.tensorrt.manifest import BuildSettings, PlanManifest, manifest_path
from app.engines.tensorrt.profiles import resolved
from app.errors import CompileError, EngineError
from app.models.image import resnet50, small_cnn
from app.models.sparsity import prune_2_to_4
from app.models.text import encoder_classifier
from app.tensors import Tensors, TensorSpec
from tests.fake_gpu import Context
from tests.onnx_files import save_onnx
from tests.quantizing import MINMAX
from tests.wording import refused

pytestmark = pytest.mark.skipif(
    "tensorrt_rtx" not in installed_engines(), reason="needs TensorRT for RTX: pip install '.[rtx]'"
)
TARGETS = ("SM89", "SM120")


@dataclass(frozen=True)
class Subject:
    """A model that is built, what it takes, and the sizes that it is built for."""

    make: Callable[[], torch.nn.Module]
    inputs: tuple[TensorSpec, ...]
    labels: int
    profile: ShapeProfile
    bounds: list[list[list[list[int]]]]
    """Of each optimisation profile and input the smallest, best and largest rows, and channels or length."""

    def batch(self) -> Tensors:
        """Rows of zeros and ones, as few as are calibrated with."""
        generator = np.random.default_rng(0)
        return {
            spec.name: generator.integers(0, 2, resolved(spec.shape, 16, 16)).astype(spec.dtype) for spec in self.inputs
        }


def _images(channels: int, size: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec("pixel_values", np.dtype(np.float32), (-1, channels, size, size)),)


def _image_bounds(channels: int) -> list[list[list[list[int]]]]:
    return [[[[fewest, channels], [rows, channels], [rows, channels]]] for fewest, rows in ((1, 1), (2, 8))]


SUBJECTS = {
    "digits": Subject(lambda: small_cnn(10, 1), _images(1, 8), 10, ShapeProfile(batch_sizes=(1, 8)), _image_bounds(1)),
    "reviews": Subject(
        lambda: encoder_classifier(100, 2, 32, 1, layers=1, width=64, heads=4),
        tuple(TensorSpec(name, np.dtype(np.int64), (-1, -1)) for name in ("input_ids", "attention_mask")),
        2,
        ShapeProfile(batch_sizes=(1, 8), lengths=(16, 32)),
        [
            [[[fewest, shortest], [rows, longest], [rows, longest]]] * 2
            for fewest, rows in ((1, 1), (2, 8))
            for shortest, longest in ((1, 16), (17, 32))
        ],
    ),
    "resnet50": Subject(
        lambda: resnet50(10, 3), _images(3, 64), 10, ShapeProfile(batch_sizes=(1, 8)), _image_bounds(3)
    ),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The ONNX file of a subject in a precision, made once."""
    folder = tmp_path_factory.mktemp("onnx")

    def file(name: str, precision: str) -> Path:
        path = folder / f"{name}-{precision}.onnx"
        if path.exists():
            return path
        subject = SUBJECTS[name]
        if precision == "int8":
            source, samples = file(name, "fp32"), [subject.batch()]
            find_quantization(source, samples, MINMAX, lambda _: Verdict((), 0.0), path, lambda _: None)
        else:
            torch.manual_seed(0)
            export_onnx(subject.make().eval(), subject.inputs, subject.batch(), path, precision)
        return path

    return file


def build(
    onnx_file: Path,
    plan: Path,
    profile: ShapeProfile,
    precision: ComputePrecision = "fp32",
    targets: tuple[str, ...] = TARGETS,
    sparse_weights: bool = False,
) -> PlanManifest:
    settings = BuildSettings(precision=precision, profile=profile, sparse_weights=sparse_weights)
    return build_plan("tensorrt_rtx", onnx_file, plan, settings, targets)


@pytest.mark.parametrize(
    ("name", "precision"),
    # Small models in int8 and fp8 are built where they are quantized, in test_quantization.
    [
        ("digits", "fp16"),
        *(pytest.param("digits", precision, marks=pytest.mark.slow) for precision in ("fp32", "bf16")),
        *(
            pytest.param(name, precision, marks=pytest.mark.slow)
            for name, precision in itertools.product(("reviews", "resnet50"), ("fp32", "fp16", "bf16"))
        ),
        pytest.param("resnet50", "int8", marks=pytest.mark.slow),
    ],
)
def test_a_plan_is_built_and_says_what_it_takes(
    name: str, precision: str, files: Callable[[str, str], Path], tmp_path: Path
) -> None:
    subject, file = SUBJECTS[name], files(name, precision)
    built = build(file, tmp_path / "model.plan", subject.profile, precision=precision)
    plan = (tmp_path / "model.plan").read_bytes()
    written = json.loads(manifest_path(tmp_path / "model.plan").read_bytes())

    assert PlanManifest.model_validate(written) == built
    assert written["plan_sha256"] == sha256_of(plan)
    assert written["key"] == {
        "machine": {
            "engine": "tensorrt_rtx",
            "engine_version": load_library("tensorrt_rtx").version,
            "architectures": list(TARGETS),
            "system": "linux-x86_64",
        },
        "onnx_sha256": sha256_of(file.read_bytes()),
        "settings": {
            "precision": precision,
            "profile": {"batch_sizes": [1, 8], "lengths": list(subject.profile.lengths)},
            "sparse_weights": False,
            "workspace_mb": None,
        },
    }
    assert [(tensor["name"], tensor["dtype"], tensor["shape"]) for tensor in written["inputs"]] == [
        (spec.name, spec.dtype.name, list(spec.shape)) for spec in subject.inputs
    ]
    (logits,) = written["outputs"]
    assert (logits["name"], logits["dtype"], logits["shape"]) == ("logits", "float32", [-1, subject.labels])
    profiles = [[[shape[:2] for shape in bounds] for bounds in profile.values()] for profile in written["profiles"]]
    assert profiles == subject.bounds


def test_a_plan_of_a_pruned_model_may_run_on_sparse_kernels(tmp_path: Path) -> None:
    subject = SUBJECTS["digits"]
    export_onnx(prune_2_to_4(subject.make().eval()), subject.inputs, subject.batch(), tmp_path / "model.onnx")
    built = build(tmp_path / "model.onnx", tmp_path / "model.plan", subject.profile, sparse_weights=True)
    assert built.key.settings.sparse_weights
    assert built.key != build(tmp_path / "model.onnx", tmp_path / "model.plan", subject.profile).key


def test_the_library_is_told_of_every_setting() -> None:
    library = load_library("tensorrt_rtx")
    builder, trt = library.trt.Builder(library.logger), library.trt
    profile = ShapeProfile(batch_sizes=(1,))
    settings = BuildSettings(precision="fp32", profile=profile, sparse_weights=True, workspace_mb=64)
    config = builder_config(library, builder, settings, ())
    flags = (trt.BuilderFlag.SPARSE_WEIGHTS, trt.BuilderFlag.TF32)
    assert [config.get_flag(flag) for flag in flags] == [True, False]
    assert config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) == 64 * 2**20


def test_a_node_that_does_not_parse_is_named(tmp_path: Path) -> None:
    save_onnx(
        tmp_path / "model.onnx",
        [helper.make_node("Nonsense", ["given"], ["answer"], name="the_node", domain="elsewhere")],
    )
    with pytest.raises(CompileError, match=r"cannot parse .*model\.onnx.*node 'the_node' \(Nonsense\)"):
        build(tmp_path / "model.onnx", tmp_path / "model.plan", ShapeProfile(batch_sizes=(1,)))
    assert not (tmp_path / "model.plan").exists()


@pytest.mark.parametrize(
    ("dtype", "shape", "rule"),
    [
        (TensorProto.BFLOAT16, ["rows", 2], "dtype.unsupported"),
        (TensorProto.FLOAT, [4, 2], "rows.not_first"),
        (TensorProto.FLOAT, ["rows", "length"], "lengths.missing"),
    ],
)
def test_a_file_from_elsewhere_must_fit(dtype: int, shape: list[int | str], rule: str, tmp_path: Path) -> None:
    save_onnx(tmp_path / "model.onnx", [helper.make_node("Identity", ["given"], ["answer"])], shape=shape, dtype=dtype)
    with refused(rule):
        build(tmp_path / "model.onnx", tmp_path / "model.plan", ShapeProfile(batch_sizes=(1,)))


@pytest.mark.parametrize(
    ("targets", "lengths", "words"),
    [
        (("SM90",), (), "does not build for SM90, only for SM75, SM80"),
        (("CURRENT",), (), "does not build for CURRENT"),
        (TARGETS, (8,), "leave out the lengths"),
    ],
)
def test_what_cannot_be_built_is_refused(
    targets: tuple[str, ...], lengths: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    save_onnx(tmp_path / "model.onnx", [helper.make_node("Relu", ["given"], ["answer"])])
    with pytest.raises(CompileError, match=words):
        build(
            tmp_path / "model.onnx",
            tmp_path / "model.plan",
            ShapeProfile(batch_sizes=(1,), lengths=lengths),
            targets=targets,
        )


def test_what_a_gpu_cannot_compute_is_refused_with_the_librarys_reason(tmp_path: Path) -> None:
    constants = {
        "zero": np.zeros((), helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT8E4M3FN)),
        "scale": np.array(0.5, np.float32),
        "weight": np.eye(2, dtype=np.float32),
    }
    nodes = [
        node
        for name in ("given", "weight")
        for node in (
            helper.make_node("QuantizeLinear", [name, "scale", "zero"], [f"{name}_q"]),
            helper.make_node("DequantizeLinear", [f"{name}_q", "scale", "zero"], [f"{name}_dq"]),
        )
    ]
    nodes.append(helper.make_node("MatMul", ["given_dq", "weight_dq"], ["answer"]))
    save_onnx(tmp_path / "model.onnx", nodes, constants)
    profile = ShapeProfile(batch_sizes=(16,))
    build(tmp_path / "model.onnx", tmp_path / "model.plan", profile, precision="fp8", targets=("SM89",))
    with pytest.raises(CompileError, match=r"for SM80: .*fp8"):
        build(tmp_path / "model.onnx", tmp_path / "model.plan", profile, precision="fp8", targets=("SM80",))


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    save_onnx(tmp_path / "model.onnx", [helper.make_node("Relu", ["given"], ["answer"])])
    build(tmp_path / "model.onnx", tmp_path / "model.plan", ShapeProfile(batch_sizes=(1, 8)))
    return tmp_path / "model.plan"


def test_a_plan_that_was_changed_is_refused_before_the_library_sees_it(plan: Path) -> None:
    content = plan.read_bytes()
    for damaged in (content[:-1], content[:1000] + b"!" + content[1001:], b""):
        plan.write_bytes(damaged)
        with pytest.raises(EngineError, match=r"model\.plan' was changed: its sha256 is"):
            open_engine("tensorrt_rtx", plan)
    manifest_path(plan).write_text("{}")
    with pytest.raises(EngineError, match="not a plan's manifest"):
        open_engine("tensorrt_rtx", plan)
    manifest_path(plan).unlink()
    with refused("manifest.missing"):
        open_engine("tensorrt_rtx", plan)


def test_a_plan_for_another_machine_is_refused_and_both_are_named(plan: Path) -> None:
    version = load_library("tensorrt_rtx").version
    manifest = manifest_path(plan)
    manifest.write_text(manifest.read_text().replace(version, "1.0.0.1").replace("SM89", "SM86"))
    with pytest.raises(EngineError) as refused:
        open_engine("tensorrt_rtx", plan)
    assert "was built for tensorrt_rtx 1.0.0.1 on SM86 or SM120" in str(refused.value)
    assert f"this is tensorrt_rtx {version} on" in str(refused.value)


def test_graphs_are_captured_of_kernels_that_are_made_for_the_shape() -> None:
    library = load_library("tensorrt_rtx")
    trt = library.trt
    engine = SimpleNamespace(create_runtime_config=lambda: Mock(spec_set=trt.IRuntimeConfig))
    config = runtime_config(library, engine)
    assert config.cuda_graph_strategy == trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
    eager = trt.DynamicShapesKernelSpecializationStrategy.EAGER
    assert config.dynamic_shapes_kernel_specialization_strategy == eager


def test_the_context_that_stands_in_for_one_has_its_methods() -> None:
    real = load_library("tensorrt_rtx").trt.IExecutionContext
    ours = {name for name in vars(Context) if not name.startswith("_")}
    assert {name for name in ours if not hasattr(real, name)} == {"ids"}
