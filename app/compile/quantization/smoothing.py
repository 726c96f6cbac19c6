"""SmoothQuant: move outliers of activations into weights, where each channel has a scale of its own.

Xiao et al. 2022, arXiv:2211.10438. After a layer norm a few channels are far larger than the others, and one scale for
all of them leaves few bits for the others. Each channel j is divided by s_j = max|x_j|^a / max|w_j|^(1 - a), and its
weights are multiplied by s_j. In float, the product stays the same.
"""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from app.compile.onnx_files import save_onnx
from app.compile.quantization.observe import largest_by_channel
from app.compile.quantization.scheme import add_initializer, float_weight, load_model
from app.config import MAX_SHARD_MB
from app.tensors import Tensors

STRENGTH = 0.5
"""The paper's a. 0 leaves outliers where they are, 1 moves all of them."""

_MOVES = ("Transpose", "Reshape", "Flatten", "Identity")


@dataclass(frozen=True)
class _Group:
    """A normalized value, and the products with constant weights that read it."""

    value: ir.Value
    users: tuple[ir.Node, ...]

    def weight(self, node: ir.Node) -> NDArray[np.float32]:
        """Return the weights of a product, of shape (channels of the value, channels of the product)."""
        tensor = float_weight(node.inputs[1])
        assert tensor is not None
        return tensor.numpy().T if _transposed(node) else tensor.numpy()


Factors = Mapping[str, NDArray[np.float32]]
"""What each channel of a value is divided by, by the value's name."""


def find_factors(source: Path, samples: Iterable[Tensors]) -> Factors:
    """Return the factors of the inputs of the products after layer norms; none if the model has none."""
    groups = _groups(load_model(source))
    if not groups:
        return {}
    largest = largest_by_channel(source, list(groups), samples)
    # All products read the same value, so their weights share one factor for each channel.
    weights = {
        name: np.concatenate([np.abs(group.weight(node)) for node in group.users], axis=1).max(axis=1)
        for name, group in groups.items()
    }
    return {name: _factors(largest[name], weights[name]) for name in groups}


def smooth(source: Path, factors: Factors, target: Path, shard_mb: int = MAX_SHARD_MB) -> None:
    """Write the model with the inputs of products divided by ``factors``, and their weights multiplied.

    Both files are in one folder, whose shards they share. The factors may be of another export of the same model. Names
    differ between two, the order does not.
    """
    if not factors:
        shutil.copy(source, target)
        return
    model = load_model(source)
    for group, by_channel in zip(_groups(model).values(), factors.values(), strict=True):
        _divide(model.graph, group, by_channel)
    # Nothing reads the old weights any more.
    RemoveUnusedNodesPass()(model)
    save_onnx(model, target, shard_mb)


def _groups(model: ir.Model) -> "dict[str, _Group]":
    return {str(value.name): group for value in _values(model) if (group := _group(value)) is not None}


def _values(model: ir.Model) -> list[ir.Value]:
    return [value for node in model.graph for value in node.outputs]


def _group(value: ir.Value) -> _Group | None:
    users = tuple(node for node, index in value.uses() if index == 0 and _is_product(node))
    return _Group(value, users) if users and _is_normalized(value) else None


def _is_product(node: ir.Node) -> bool:
    weight = float_weight(node.inputs[1]) if node.op_type in ("MatMul", "Gemm") else None
    return weight is not None and len(weight.shape) == 2 and not node.attributes.get_int("transA", 0)


def _is_normalized(value: ir.Value) -> bool:
    producer = value.producer()
    while producer is not None and producer.op_type in _MOVES:
        moved = producer.inputs[0]
        producer = moved.producer() if moved is not None else None
    return producer is not None and producer.op_type == "LayerNormalization"


def _factors(activations: NDArray[np.float32], weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return s by channel; 1 for a channel that is always 0 or not finite, or whose weights are."""
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = activations**STRENGTH / weights ** (1 - STRENGTH)
    return np.where(np.isfinite(factors) & (factors > 0), factors, 1.0).astype(np.float32)


def _divide(graph: ir.Graph, group: _Group, factors: NDArray[np.float32]) -> None:
    name = f"{group.value.name}_smoothed"
    divisor = add_initializer(graph, f"{name}_by", np.reciprocal(factors))
    divide = ir.node("Mul", [group.value, divisor], name=name)
    divide.outputs[0].name, divide.outputs[0].dtype = name, ir.DataType.FLOAT
    producer = group.value.producer()
    assert producer is not None
    for node in group.users:
        array = group.weight(node) * factors[:, None]
        array = array.T if _transposed(node) else array
        weight = add_initializer(graph, f"{node.name}_smoothed_weight", np.ascontiguousarray(array))
        # Other readers of the value still get it undivided.
        node.replace_input_with(0, divide.outputs[0])
        node.replace_input_with(1, weight)
    graph.insert_after(producer, divide)


def _transposed(node: ir.Node) -> bool:
    return bool(node.attributes.get_int("transB", 0))
