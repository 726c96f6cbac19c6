"""Quantisation: the ranges, and what is written."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import openvino
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from scipy.stats import entropy

from app.compile.quantization.qdq import INT8, INT8_OF_7_BITS, Format, int8, write_quantized
from app.compile.quantization.ranges import Histogram, threshold
from app.compile.quantization.scheme import find_layers, load_model
from app.compile.quantization.search import quantize_fp8
from app.engines.base import EngineSettings, ShapeProfile
from app.engines.onnxruntime import open_oracle
from app.engines.registry import installed_engines, open_engine
from app.engines.tensorrt.build import build_plan
from app.engines.tensorrt.manifest import BuildSettings
from app.repository.manifest import Quantization
from app.tensors import OUTPUT
from tests.onnx_files import save_onnx
from tests.quantizing import SUBJECTS, TEXT, Subject

PRODUCT = helper.make_node("MatMul", ["given", "weight"], ["logits"], name="product")


def seen(*tensors: NDArray[np.float32] | list[float]) -> Histogram:
    histogram = Histogram()
    for tensor in tensors:
        histogram.add(np.asarray(tensor, np.float32))
    return histogram


def test_minmax_is_the_largest_magnitude() -> None:
    assert threshold(seen([0.5, -3.0], [2.0]), "minmax") == 3.0


def test_a_percentile_leaves_out_one_value_in_ten_thousand() -> None:
    often, rare = np.ones(9999, np.float32), [100.0]
    assert threshold(seen(often, rare), "percentile") == pytest.approx(1.0, abs=0.05)
    assert threshold(seen(often, rare, rare), "percentile") == 100.0


@pytest.mark.parametrize("first", [0.0, 1e-42, 0.001, 1.0, 100.0])
def test_a_histogram_is_the_same_whatever_came_first(first: float) -> None:
    values = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    histogram = seen([first], values, values * 10)
    everything = np.abs(np.concatenate([[first], values, values * 10]))
    edges = np.arange(len(histogram.counts) + 1) * histogram.width
    expected, _ = np.histogram(everything, edges)
    assert histogram.counts.sum() == 20_001
    assert np.abs(np.cumsum(histogram.counts - expected)).max() <= 2  # values on an edge round either way
    assert len(histogram.seen) > 2048


def test_weights_too_small_for_a_scale_become_zeros(tmp_path: Path) -> None:
    weight = np.array([[1.0, 5e-44], [-2.0, 1e-45]], np.float32)
    save_onnx(tmp_path / "model.onnx", [PRODUCT], {"weight": weight})
    layers = find_layers(load_model(tmp_path / "model.onnx"))
    write_quantized(tmp_path / "model.onnx", layers, {"given": 1.0}, INT8, tmp_path / "int8.onnx")
    with closing(open_oracle(tmp_path / "int8.onnx")) as engine:
        answers = engine.infer({"given": np.ones((1, 2), np.float32)})[OUTPUT]
    assert answers == pytest.approx(np.array([[-1.0, 0.0]]), abs=0.02)


def test_a_deep_chain_of_activations_is_read_once(tmp_path: Path) -> None:
    nodes, value = [], "given"
    for depth in range(60):  # each value is used twice: read once for each use, there would be 2^60 steps
        nodes += [
            helper.make_node("Sigmoid", [value], [f"gate{depth}"], name=f"sigmoid{depth}"),
            helper.make_node("Mul", [value, f"gate{depth}"], [f"value{depth}"], name=f"mul{depth}"),
        ]
        value = f"value{depth}"
    nodes.append(helper.make_node("MatMul", [value, "weight"], ["logits"], name="product"))
    save_onnx(tmp_path / "model.onnx", nodes, {"weight": np.eye(2, dtype=np.float32)})
    assert [layer.name for layer in find_layers(load_model(tmp_path / "model.onnx"))] == ["product"]


def divergence_in_words(counts: NDArray[np.int64], bins: int) -> float:
    """Of TensorRT's calibration, level by level."""
    reference = counts[:bins].astype(float)
    reference[-1] += counts[bins:].sum()
    merged = np.zeros(bins)
    for level in range(128):
        of_level = slice(level * bins // 128, (level + 1) * bins // 128)
        kept = counts[of_level]
        if kept.any():
            merged[of_level] = np.where(kept > 0, kept.sum() / (kept > 0).sum(), 0.0)
    return float(entropy(reference, merged)) if merged.any() else float("inf")


def test_entropy_clips_what_is_rare_where_the_divergence_is_least() -> None:
    generator = np.random.default_rng(0)
    bulk = generator.normal(size=200_000).astype(np.float32)
    histogram = seen(np.append(bulk, generator.uniform(20, 40, 20).astype(np.float32)))
    found = threshold(histogram, "entropy")

    counts = histogram.seen.copy()
    counts[0] = counts[1]
    candidates = [*range(128, len(counts), 16), len(counts)]
    best = min(reversed(candidates), key=lambda bins: divergence_in_words(counts, bins))
    assert found == pytest.approx(best * histogram.width)
    assert 2.5 < found < 6.0 < histogram.largest


@pytest.mark.parametrize("values", [np.linspace(0, 1, 100_000), np.repeat(np.arange(17) / 16, 1000)])
def test_entropy_clips_nothing_where_nothing_is_rare(values: NDArray[np.float64]) -> None:
    assert threshold(seen(values.astype(np.float32)), "entropy") == 1.0


@pytest.fixture(scope="module", params=list(SUBJECTS))
def quantized(request: pytest.FixtureRequest, subject: Callable[[str], Subject]) -> tuple[Subject, Path]:
    return subject(request.param), subject(request.param).quantized(at_least=0.97)[0]


def test_int8_answers_as_pytorch_does_in_the_oracle_and_in_openvino(quantized: tuple[Subject, Path]) -> None:
    subject, file = quantized
    with (
        closing(open_oracle(file)) as oracle,
        closing(open_engine("openvino", file, EngineSettings(precision="int8"))) as engine,
    ):
        assert subject.cosine(oracle.infer) > 0.97
        assert subject.cosine(engine.infer) > 0.97
        for batch in subject.samples:
            exact, fused = oracle.infer(batch)[OUTPUT], engine.infer(batch)[OUTPUT]
            assert np.abs(fused - exact).mean() < 0.01 * np.abs(exact).max()  # a value on an edge rounds either way


def test_openvino_runs_every_layer_in_int8(quantized: tuple[Subject, Path]) -> None:
    subject, file = quantized
    compiled = openvino.Core().compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    kinds = [
        (info["layerType"].astype(str), info["runtimePrecision"].astype(str))
        for info in (node.get_rt_info() for node in compiled.get_runtime_model().get_ordered_ops())
    ]
    weighted = [precision for kind, precision in kinds if kind in ("Convolution", "FullyConnected")]
    in_float = 1 if "reviews" in str(file) else 0  # the maximum over the tokens
    layers = [layer for layer in find_layers(load_model(subject.file)) if layer.weight and layer.activations]
    in_int8 = [precision for precision in weighted if precision in ("i8", "u8")]  # which of them, the CPU decides
    assert len(in_int8) == len(layers) == len(weighted) - in_float


def test_the_file_has_the_shape_that_tensorrt_takes(quantized: tuple[Subject, Path]) -> None:
    subject, file = quantized
    graph = onnx.load(file).graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    makers = {output: node for node in graph.node for output in node.output}
    assert {node.op_type for node in graph.node} >= {"QuantizeLinear", "DequantizeLinear"}
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert constants[node.input[2]].dtype == np.int8
            assert not constants[node.input[2]].any()
        if node.op_type == "QuantizeLinear":
            assert constants[node.input[1]].shape == ()
        if node.op_type in ("Conv", "Gemm") and len(node.input) == 3:
            assert constants[node.input[2]].dtype == np.float32  # the bias
    by_channel = [node for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0] in constants]
    assert all(makers.get(node.output[0]) is node for node in by_channel)
    for node in by_channel:
        quantized_weight, axis = constants[node.input[0]], node.attribute[0].i
        largest = np.abs(quantized_weight).max(axis=tuple({*range(quantized_weight.ndim)} - {axis}))
        assert set(largest) <= {0, int8().largest_weight}
        assert constants[node.input[1]].shape == (quantized_weight.shape[axis],)
    assert file.stat().st_size < 0.5 * subject.file.stat().st_size


@pytest.mark.skipif("tensorrt_rtx" not in installed_engines(), reason="needs TensorRT for RTX: pip install '.[rtx]'")
def test_tensorrt_builds_the_file(quantized: tuple[Subject, Path], tmp_path: Path) -> None:
    subject, file = quantized
    profile = ShapeProfile(batch_sizes=(8,), lengths=(24,) if subject.specs == TEXT else ())
    fp8, weights_only = tmp_path / "fp8.onnx", tmp_path / "weights_only.onnx"
    quantize_fp8(subject.file, subject.samples, fp8, print)
    layers = [replace(layer, activations=()) for layer in find_layers(load_model(subject.file))]
    write_quantized(subject.file, layers, {}, INT8, weights_only)
    for precision, model in (("int8", file), ("int8", weights_only), ("fp8", fp8)):
        settings = BuildSettings.model_validate({"precision": precision, "profile": profile})
        build_plan("tensorrt_rtx", model, tmp_path / f"{precision}.plan", settings, ("SM89", "SM120"))


def test_fp8_answers_as_pytorch_does(subject: Callable[[str], Subject], tmp_path: Path) -> None:
    digits = subject("digits")
    found = quantize_fp8(digits.file, digits.samples, tmp_path / "fp8.onnx", print)
    assert found == Quantization(method="minmax", smoothing=0.0, exempt=())
    assert digits.evaluate(tmp_path / "fp8.onnx", at_least=0.98).passed


@pytest.mark.parametrize(
    ("kind", "weights", "scales"),
    [
        (INT8, [[127, 0, -127], [64, 0, 64]], [1 / 127, 1.0, 0.1]),
        (INT8_OF_7_BITS, [[64, 0, -64], [32, 0, 32]], [1 / 64, 1.0, 12.7 / 64]),
    ],
)
def test_a_scale_for_each_channel_is_worked_out_from_its_weights(
    kind: Format, weights: list[list[int]], scales: list[float], tmp_path: Path
) -> None:
    weight = np.array([[1.0, 0.0, -12.7], [0.5, 0.0, 6.35]], np.float32)
    save_onnx(tmp_path / "model.onnx", [PRODUCT], {"weight": weight}, answered=("rows", 3))
    model = load_model(tmp_path / "model.onnx")
    (layer,) = find_layers(model)
    write_quantized(tmp_path / "model.onnx", [layer], {"given": 2.54}, kind, tmp_path / "int8.onnx")
    constants = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(tmp_path / "int8.onnx").graph.initializer
    }
    np.testing.assert_array_equal(constants["weight_by_1_quantized"], weights)
    np.testing.assert_allclose(constants["weight_by_1_scale"], scales, rtol=1e-6)
    np.testing.assert_allclose(constants["given_scale"], 0.02, rtol=1e-6)
