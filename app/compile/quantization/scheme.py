"""Find the nodes of a model to quantize, and which of their inputs.

Convolutions, products with constant weights and embedding tables are quantized. Between them the model stays in
float32, with two exceptions that let kernels pass on int8: the other branch of an addition to a convolution, and the
input of a maximum pooling before one. Attention's own products stay in float, too. Quantized, they were no faster in
OpenVINO, which then runs a kernel for each step, and further from PyTorch.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveInitializersFromInputsPass
from onnxscript.optimizer import fold_constants

from app.compile.onnx_files import save_onnx
from app.config import MAX_SHARD_MB
from app.errors import CompileError

MIN_OPSET = 13
"""The first opset in which scales have an axis."""

_MIN_IR_VERSION = 4
"""The first version in which an initializer is no input."""

_FOLDED = ("Identity", "Transpose")
_FUSED_INTO_REDUCTIONS = {
    *("Add", "Clip", "Div", "Gelu", "Mul", "Relu", "Sigmoid", "Sub", "Tanh"),
    *("Concat", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"),
}


@dataclass(frozen=True)
class Port:
    """One input of a node."""

    node: str
    index: int


@dataclass(frozen=True)
class Weight:
    """A constant input. ``axis`` is that of its channels, of which each has its own scale."""

    port: Port
    axis: int


@dataclass(frozen=True)
class Layer:
    """The inputs that are quantized, or left in float, together.

    ``activations`` are the ports whose values are quantized per tensor. An embedding table has none.
    """

    name: str
    activations: tuple[Port, ...]
    weight: Weight | None


def load_model(source: Path) -> ir.Model:
    """Read an ONNX file, and give every node a unique name that is the same each time the file is read.

    Raises:
        CompileError: its opset is older than ``MIN_OPSET``.
    """
    model = ir.load(source)
    opset = model.opset_imports.get("", 0)
    if opset < MIN_OPSET:
        raise CompileError(
            f"the model has operators of opset {opset}: int8 and fp8 need {MIN_OPSET} or later; export it again"
        ).of("opset.too_old")
    taken: set[str] = set()
    for index, node in enumerate(model.graph):
        # Layers are found by name in each copy of the file.
        if not node.name or node.name in taken:
            node.name = f"{node.name or node.op_type}_{index}"
        taken.add(node.name)
    return model


def fold_weights(source: Path, target: Path, shard_mb: int = MAX_SHARD_MB) -> None:
    """Write a model whose constant weights are all initializers, with more MiB than ``shard_mb`` in shards.

    Exporters also write a weight as a Constant, behind an Identity or a Transpose, and in old files as an input.
    """
    model = ir.load(source)
    lift = LiftConstantsToInitializersPass(size_limit=0)
    ir.passes.Sequential(lift, RemoveInitializersFromInputsPass())(model)
    fold_constants(
        model,
        input_size_limit=sys.maxsize,
        output_size_limit=sys.maxsize,
        should_fold=lambda node: node.op_type in _FOLDED,
    )
    lift(model)
    model.ir_version = max(model.ir_version, _MIN_IR_VERSION)
    save_onnx(model, target, shard_mb)


def find_layers(model: ir.Model) -> list[Layer]:
    """Return every layer that can be quantized, in execution order."""
    return [layer for node in model.graph if (layer := _layer(node)) is not None]


def float_weight(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the content of a float32 initializer; None for any other value."""
    if value is None or not value.is_initializer() or value.is_graph_input():
        return None
    return value.const_value if value.dtype == ir.DataType.FLOAT else None


def add_initializer(graph: ir.Graph, name: str, array: NDArray[np.generic]) -> ir.Value:
    """Add a constant to a graph."""
    value = ir.val(name, const_value=ir.tensor(array, name=name))
    graph.register_initializer(value)
    return value


def name_of(node: ir.Node) -> str:
    """Return a node's name. ``load_model`` has named all nodes."""
    assert node.name is not None
    return node.name


def _layer(node: ir.Node) -> Layer | None:
    match node.op_type:
        case "Conv" if float_weight(node.inputs[1]):
            return _with_weight(node, axis=0)
        case "Gemm" if float_weight(node.inputs[1]) and not node.attributes.get_int("transA", 0):
            return _with_weight(node, axis=0 if node.attributes.get_int("transB", 0) else 1)
        # A weight with more axes is a batch of matrices, in which channels are no single axis.
        case "MatMul" if weight := float_weight(node.inputs[1]):
            return _with_weight(node, axis=1) if len(weight.shape) == 2 else None
        case "Gather" if (table := float_weight(node.inputs[0])) and not node.attributes.get_int("axis", 0):
            weight_at = Weight(_port(node, 0), axis=0)
            return Layer(name_of(node), (), weight_at) if len(table.shape) == 2 else None
    return None


def _with_weight(node: ir.Node, axis: int) -> Layer | None:
    # A constant input has no range to find.
    if float_weight(node.inputs[0]) or _is_reduced(node.inputs[0]):
        return None
    activations = (_before_pooling(node), *_residuals(node))
    return Layer(name_of(node), activations, Weight(_port(node, 1), axis))


def _before_pooling(node: ir.Node) -> Port:
    """Return where a layer's input is quantized: before a maximum pooling, which then runs in int8.

    If nodes other than convolutions read the pooling, they keep its float values.
    """
    given = node.inputs[0]
    assert given is not None
    pooling = given.producer()
    if (
        pooling is not None
        and pooling.op_type == "MaxPool"
        and all(user.op_type == "Conv" for user in given.consumers())
    ):
        return _port(pooling, 0)
    return _port(node, 0)


def _residuals(node: ir.Node) -> Iterator[Port]:
    """Yield the other input of an addition that runs as a part of the convolution's kernel."""
    # With another reader, the addition cannot run inside the convolution.
    if node.op_type != "Conv" or len(node.outputs[0].uses()) != 1:
        return
    (use,) = node.outputs[0].uses()
    if use.node.op_type != "Add":
        return
    other = use.node.inputs[1 - use.idx]
    if other is None or other.is_initializer():
        return
    producer = other.producer()
    both_are_convolutions = producer is not None and producer.op_type == "Conv" and len(other.uses()) == 1
    if not (both_are_convolutions and use.idx == 1):  # one of two convolutions is enough
        yield _port(use.node, 1 - use.idx)


def _is_reduced(value: ir.Value | None) -> bool:
    """Return True if a maximum or minimum over an axis produces the value, with only fusable nodes in between.

    OpenVINO 2026.4 fuses the following QuantizeLinear into the reduction, and then returns wrong numbers.
    """
    # Branches can meet again, and each node is followed once.
    values, seen = [value], set[ir.Node]()
    while values:
        current = values.pop()
        producer = current.producer() if current is not None else None
        if producer is None or producer in seen:
            continue
        if producer.op_type in ("ReduceMax", "ReduceMin"):
            return True
        seen.add(producer)
        if producer.op_type in _FUSED_INTO_REDUCTIONS:
            values.extend(producer.inputs)
    return False


def _port(node: ir.Node, index: int) -> Port:
    return Port(name_of(node), index)
