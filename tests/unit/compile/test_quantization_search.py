"""The search for a calibration, and for layers that stay in float."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from app.compile.quantization.observe import observe
from app.compile.quantization.qdq import INT8, write_quantized
from app.compile.quantization.scheme import find_layers, load_model
from app.compile.quantization.search import Verdict, find_quantization, quantize_fp8
from app.config import CalibrationConfig
from app.repository.manifest import Quantization
from app.tensors import OUTPUT, TensorSpec
from tests.onnx_files import save_onnx
from tests.quantizing import FLOATS, MINMAX, Subject, pictures, row_of_layers
from tests.wording import refused


@pytest.mark.parametrize("sensitive", [[3], [1, 4]])
def test_the_layers_that_hurt_stay_in_float_and_no_others(sensitive: list[int], tmp_path: Path) -> None:
    subject = row_of_layers(sensitive, tmp_path)
    lines: list[str] = []
    found = find_quantization(
        subject.file, subject.samples, CalibrationConfig(), subject.evaluate, tmp_path / "int8.onnx", lines.append
    )
    layers = [layer.name for layer in find_layers(load_model(subject.file))]
    assert sorted(found.exempt) == [layers[index] for index in sensitive]
    assert subject.evaluate(tmp_path / "int8.onnx").passed
    assert found.weights_only, "it passes with the weights in int8 as well"
    assert sum("from PyTorch" in line for line in lines) <= 3 + 2 + 1  # calibrations, one layer, two, their weights


def test_the_weights_of_layers_in_float_stay_there_too_if_they_hurt(tmp_path: Path) -> None:
    subject = row_of_layers([3], tmp_path)

    def evaluate(path: Path) -> Verdict:
        constants = onnx.load(path).graph.initializer
        in_int8 = [
            constant for constant in constants if constant.data_type == TensorProto.INT8 and len(constant.dims) == 2
        ]
        return Verdict((), 0.0) if len(in_int8) < 6 else Verdict(("too far",), 1.0)

    target = tmp_path / "int8.onnx"
    found = find_quantization(subject.file, subject.samples, MINMAX, evaluate, target, lambda line: None)
    assert (len(found.exempt), found.weights_only, evaluate(target).passed) == (1, False, True)


def test_smoothing_keeps_outliers_from_taking_the_bits_of_other_channels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    with torch.no_grad():
        model[0].weight[:2], model[3].weight[:2] = 100.0, 100.0
        model[1].weight[:, :2] /= 100
        model[4].weight[:, :2] /= 100
    samples = [{"input": picture["pixel_values"].reshape(8, 64)} for picture in pictures(1, 8)]
    subject = Subject(model, (TensorSpec("input", FLOATS, (-1, 64)),), samples, tmp_path)
    file, found = subject.quantized(at_least=0.0)
    layers = find_layers(load_model(subject.file))
    largest = {name: range_.largest for name, range_ in observe(subject.file, layers, samples).items()}
    write_quantized(subject.file, layers, largest, INT8, tmp_path / "plain.onnx")
    assert found == Quantization(method="minmax", smoothing=0.5, exempt=())
    assert subject.evaluate(file).loss < 0.1 * subject.evaluate(tmp_path / "plain.onnx").loss


def test_if_nothing_passes_the_closest_try_is_kept_and_told(tmp_path: Path) -> None:
    subject, lines = row_of_layers([], tmp_path), []
    losses: list[float] = []

    def refuse(path: Path) -> Verdict:
        losses.append(subject.evaluate(path).loss)
        return Verdict(("no kernel",), losses[-1])

    target = tmp_path / "int8.onnx"
    found = find_quantization(subject.file, subject.samples, CalibrationConfig(), refuse, target, lines.append)
    assert subject.evaluate(target).loss == min(losses)
    assert len(found.exempt) == 3
    assert all("fails, " in line and "(no kernel)" in line for line in lines if "from PyTorch" in line)
    assert "int8 fails the gates after 6 attempts, the last with 3 of 6 layers in float; the closest, " in lines[-1]
    assert set(tmp_path.iterdir()) == {subject.file, target}


PRODUCT = [helper.make_node("MatMul", ["given", "weight"], [OUTPUT], name="the_product")]


@pytest.mark.parametrize(
    ("nodes", "weight", "rows", "rule", "key"),
    [
        (PRODUCT, np.eye(2), np.ones((15, 2)), "calibration.too_few", "compile.calibration.samples"),
        (PRODUCT, np.eye(2), np.full((16, 2), np.nan), "activations.not_finite", None),
        (PRODUCT, np.eye(2), np.zeros((16, 2)), "activations.all_zero", "compile.calibration.samples"),
        (PRODUCT, np.full((2, 2), np.inf), np.ones((16, 2)), "weights.not_finite", None),
        (
            [helper.make_node("Relu", ["given"], [OUTPUT])],
            np.eye(2),
            np.ones((16, 2)),
            "layers.none",
            "compile.precisions",
        ),
    ],
)
def test_what_cannot_be_quantized_is_refused_by_name(
    nodes: list[onnx.NodeProto],
    weight: NDArray[np.float64],
    rows: NDArray[np.float64],
    rule: str,
    key: str | None,
    tmp_path: Path,
) -> None:
    save_onnx(tmp_path / "model.onnx", nodes, {"weight": weight.astype(np.float32)} if nodes is PRODUCT else {})
    with refused(rule, key):
        find_quantization(
            tmp_path / "model.onnx",
            [{"given": rows.astype(np.float32)}],
            MINMAX,
            lambda path: Verdict((), 0.0),
            tmp_path / "int8.onnx",
            lambda line: None,
        )
    assert list(tmp_path.iterdir()) == [tmp_path / "model.onnx"]


def test_operators_from_before_scales_had_an_axis_are_refused(tmp_path: Path) -> None:
    save_onnx(tmp_path / "model.onnx", PRODUCT, {"weight": np.eye(2, dtype=np.float32)})
    model = onnx.load(tmp_path / "model.onnx")
    model.opset_import[0].version = 12
    onnx.save(model, tmp_path / "model.onnx")
    with refused("opset.too_old"):
        quantize_fp8(tmp_path / "model.onnx", [{"given": np.ones((16, 2), np.float32)}], tmp_path / "fp8.onnx", print)


KERNEL = helper.make_node("MatMul", ["given", "kernel"], [OUTPUT])
CONSTANT = helper.make_node("Constant", [], ["kernel"], value=numpy_helper.from_array(np.eye(2, dtype=np.float32)))


@pytest.mark.parametrize(
    ("nodes", "is_input"),
    [
        ([CONSTANT, KERNEL], False),
        ([helper.make_node("Transpose", ["weight"], ["kernel"]), KERNEL], False),
        ([helper.make_node("Identity", ["weight"], ["kernel"]), KERNEL], False),
        (PRODUCT, True),  # in a file of 2018
    ],
)
def test_weights_are_found_however_an_exporter_writes_them(
    nodes: list[onnx.NodeProto], is_input: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    save_onnx(path, nodes, {} if nodes[0] is CONSTANT else {"weight": np.eye(2, dtype=np.float32)})
    if is_input:
        model = onnx.load(path)
        model.ir_version = 3
        model.graph.input.append(helper.make_tensor_value_info("weight", onnx.TensorProto.FLOAT, [2, 2]))
        onnx.save(model, path)
    rows = [{"given": np.random.default_rng(0).standard_normal((16, 2)).astype(np.float32)}]
    find_quantization(path, rows, MINMAX, lambda file: Verdict((), 0.0), tmp_path / "int8.onnx", print)
    written = onnx.load(tmp_path / "int8.onnx")
    assert [node.op_type for node in written.graph.node].count("DequantizeLinear") == 2
    assert onnx.TensorProto.INT8 in [tensor.data_type for tensor in written.graph.initializer]


def test_a_layer_whose_input_is_always_0_stays_in_float(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Clip", ["given", "zero", "zero"], ["dead"]),
        helper.make_node("MatMul", ["dead", "weight"], ["left"], name="of_the_dead"),
        helper.make_node("MatMul", ["given", "weight"], ["right"], name="of_the_living"),
        helper.make_node("Add", ["left", "right"], [OUTPUT]),
    ]
    save_onnx(
        tmp_path / "model.onnx", nodes, {"weight": np.eye(2, dtype=np.float32), "zero": np.array(0.0, np.float32)}
    )
    told: list[str] = []
    rows = [{"given": np.random.default_rng(0).standard_normal((16, 2)).astype(np.float32)}]
    find_quantization(
        tmp_path / "model.onnx", rows, MINMAX, lambda file: Verdict((), 0.0), tmp_path / "int8.onnx", told.append
    )
    assert "1 of 2 layers stay in float, of_the_dead: their inputs are 0 in all calibration samples" in told[0]
    written = {node.name: node for node in onnx.load(tmp_path / "int8.onnx").graph.node}
    assert written["of_the_dead"].input[0] == "dead"
    assert written["of_the_living"].input[0] == "given_dequantized"


def test_layers_are_ranked_on_rows_of_all_batches(tmp_path: Path) -> None:
    """Batches are sorted by length, and what is sensitive in long texts may be 0 in short ones."""
    nodes = [
        helper.make_node("MatMul", ["short", "weight"], ["left"], name="of_short"),
        helper.make_node("MatMul", ["long", "weight"], ["right"], name="of_long"),
        helper.make_node("Add", ["left", "right"], [OUTPUT]),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in ("short", "long")]
    output = helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["n", 2])
    weight = numpy_helper.from_array(np.eye(2, dtype=np.float32), "weight")
    graph = helper.make_graph(nodes, "g", inputs, [output], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "model.onnx")
    generator = np.random.default_rng(0)
    batches = [generator.standard_normal((16, 4)).astype(np.float32) for _ in range(4)]
    samples = [
        {"short": batch[:, :2], "long": batch[:, 2:] * np.float32(100 * (number > 0))}
        for number, batch in enumerate(batches)
    ]

    def evaluate(path: Path) -> Verdict:
        read = {node.name: node.input[0] for node in onnx.load(path).graph.node}
        return Verdict(() if read["of_long"] == "long" else ("of_long is in int8",), 1.0)

    found = find_quantization(tmp_path / "model.onnx", samples, MINMAX, evaluate, tmp_path / "int8.onnx", print)
    assert found.exempt == ("of_long",)
