"""Engines on a GPU. Not run in CI, which has none: 'make test-gpu' on a machine with one."""

import copy
import functools
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from upath import UPath

from app.compile.export import export_onnx
from app.compile.parity import compare
from app.compile.quantization.search import quantize_fp8
from app.compile.run import compile_model
from app.compile.source_model import load_source_model
from app.config import ComputePrecision, GatesConfig, Precision, load_recipe
from app.engines.architecture import compute_capability
from app.engines.base import Engine, EngineSettings, ShapeProfile, Signature
from app.engines.registry import installed_engines, open_engine
from app.engines.tensorrt.build import build_plan
from app.engines.tensorrt.library import Flavour, load_library
from app.engines.tensorrt.manifest import BuildSettings, manifest_path
from app.engines.torch import TorchEngine
from app.errors import EngineError
from app.models.image import small_cnn
from app.published.loaded import load_model
from app.runs import Run, execute
from app.tensors import OUTPUT, TensorSpec
from benchmarks.compile.models import leave_fresh, write_weights
from tests.engine_contract import PROCESSOR, SIGNATURE, TEXTS, EngineContract, encoder, exported, rows
from tests.helpers import ROOT
from tests.quantizing import digits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none")

PROFILE = ShapeProfile(batch_sizes=(1, 4, 16), lengths=(8, 16, 32))


def skip_unless_it_runs(flavour: Flavour) -> None:
    if flavour not in installed_engines():
        pytest.skip(f"needs {flavour}, which is not installed")
    targets = load_library(flavour).targets
    if targets and compute_capability() not in targets:
        pytest.skip(f"{flavour} does not run on {compute_capability()}, only on {', '.join(targets)}")


def build(flavour: Flavour, onnx: Path, precision: ComputePrecision = "fp32", profile: ShapeProfile = PROFILE) -> Path:
    plan = onnx.with_suffix(".plan")
    build_plan(flavour, onnx, plan, BuildSettings(precision=precision, profile=profile))
    return plan


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Flavour], Path]:
    """The plan of a flavour, built once."""

    @functools.cache
    def plan(flavour: Flavour) -> Path:
        onnx = tmp_path_factory.mktemp(flavour) / "model.onnx"
        onnx.write_bytes(exported())
        return build(flavour, onnx)

    return plan


class TestTensorRt(EngineContract):
    flavour: Flavour = "tensorrt"

    @pytest.fixture
    def plan(self, plans: Callable[[Flavour], Path]) -> Path:
        skip_unless_it_runs(self.flavour)
        return plans(self.flavour)

    @pytest.fixture
    def opener(self, plan: Path) -> Callable[[], Engine]:
        settings = EngineSettings(streams=2, cache=plan.parent / "cache")
        return lambda: open_engine(self.flavour, plan, settings)

    @pytest.mark.parametrize("precision", ["fp16", "bf16"])
    def test_lower_precisions_are_near(self, precision: Precision, tmp_path: Path) -> None:
        skip_unless_it_runs(self.flavour)
        onnx = tmp_path / "model.onnx"
        export_onnx(encoder(), PROCESSOR.inputs, PROCESSOR.encode(TEXTS), onnx, precision)
        engine = open_engine(self.flavour, build(self.flavour, onnx, precision))
        exact = encoder()(**{name: torch.from_numpy(array) for name, array in rows(7).items()}).detach().numpy()
        assert 0.0 < np.abs(engine.infer(rows(7))[OUTPUT] - exact).max() < 0.05

    @pytest.mark.parametrize("precision", ["int8", "fp8"])
    def test_quantized_plans_are_near(self, precision: ComputePrecision, tmp_path: Path) -> None:
        skip_unless_it_runs(self.flavour)
        if precision == "fp8" and torch.cuda.get_device_capability() < (8, 9):
            pytest.skip(f"{compute_capability()} does not compute in fp8: SM89 and later do")
        torch.manual_seed(0)
        subject, onnx = digits(tmp_path), tmp_path / f"{precision}.onnx"
        if precision == "fp8":
            quantize_fp8(subject.file, subject.samples, onnx, print)
        else:
            subject.quantized()
        plan = build(self.flavour, onnx, precision, ShapeProfile(batch_sizes=(1, 64)))
        with closing(open_engine(self.flavour, plan)) as engine:
            assert subject.cosine(engine.infer) > 0.97

    def test_what_is_compiled_and_published_is_served_from_its_plan(self, tmp_path: Path) -> None:
        skip_unless_it_runs(self.flavour)
        recipe, storage = str(ROOT / "recipes/digits.yaml"), tmp_path / "storage"
        weights = write_weights(load_recipe(recipe), 10, leave_fresh, tmp_path)
        overrides = [f"storage={storage}", f"compile.weights={weights}", f"compile.engines=[{self.flavour}]"]
        run = Run.start("compile", load_recipe(recipe, [*overrides, "compile.batch_sizes=[1,8]"]))
        result = execute(run, compile_model)
        assert result.status == "succeeded", result.error
        name, _, version = result.artifacts["model"].partition("/")
        model = load_model(UPath(storage), name, int(version), threads=1, max_batch_size=8)
        assert model.platform == f"{self.flavour}_plan"
        served = compare(model.engine, load_source_model(weights, load_recipe(recipe), threads=1).reference, 8)
        assert served.accuracy == pytest.approx(result.metrics["chosen"]["accuracy"], abs=0.01)

    def test_a_plan_for_another_gpu_is_refused(self, plan: Path, tmp_path: Path) -> None:
        elsewhere = tmp_path / "model.plan"
        elsewhere.write_bytes(plan.read_bytes())
        here = str(compute_capability())
        manifest_path(elsewhere).write_text(manifest_path(plan).read_text().replace(here, "SM70"))
        with pytest.raises(EngineError, match=f"on SM70.*this is .* on {here}"):
            open_engine(self.flavour, elsewhere)


class TestTensorRtRtx(TestTensorRt):
    flavour: Flavour = "tensorrt_rtx"

    def test_compiled_kernels_are_kept(self, opener: Callable[[], Engine], plan: Path) -> None:
        opener().close()
        (kept,) = (plan.parent / "cache").iterdir()
        kept.write_bytes(kept.read_bytes()[:-1])  # such a file counts as none
        opener().close()
        assert [kept] == list((plan.parent / "cache").iterdir())


class TestOnnxRuntimeOnCuda(EngineContract):
    @pytest.fixture
    def opener(self, onnx: Path) -> Callable[[], Engine]:
        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            pytest.skip("needs the package onnxruntime-gpu in place of onnxruntime")
        return lambda: open_engine("onnxruntime", onnx, EngineSettings(streams=2, device="gpu"))


class TestPyTorchOnGpu(EngineContract):
    @pytest.fixture
    def opener(self) -> Callable[[], Engine]:
        return lambda: TorchEngine(copy.deepcopy(encoder()), SIGNATURE, EngineSettings(streams=2, device="gpu"))


def test_convolutions_in_float32_hold_the_gate_of_fp32_on_the_gpu() -> None:
    """TF32, torch's default in convolutions, has 10 bits of mantissa and fails this gate."""
    network = small_cnn(num_labels=10, channels=3, width=64).eval()
    signature = Signature(
        (TensorSpec("pixel_values", np.dtype(np.float32), (-1, 3, 32, 32)),),
        (TensorSpec(OUTPUT, np.dtype(np.float32), (-1, 10)),),
    )
    pictures = {"pixel_values": np.random.default_rng(0).standard_normal((64, 3, 32, 32), np.float32)}
    answers = [
        TorchEngine(copy.deepcopy(network), signature, EngineSettings(device=device)).infer(pictures)[OUTPUT]
        for device in ("cpu", "gpu")
    ]
    assert np.abs(answers[0] - answers[1]).max() <= GatesConfig().max_difference
