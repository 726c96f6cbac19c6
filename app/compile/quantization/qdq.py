"""Write a model with QuantizeLinear and DequantizeLinear nodes around the quantized values.

The file has the form that TensorRT accepts: symmetric, with zero points of 0, 8-bit constants directly before a
DequantizeLinear, and float32 biases. OpenVINO fuses it into int8 kernels.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, RemoveUnusedNodesPass

from app.compile.onnx_files import save_onnx
from app.compile.quantization.scheme import Layer, Port, Weight, add_initializer, float_weight, load_model
from app.config import MAX_SHARD_MB
from app.engines.architecture import adds_products_in_16_bits
from app.errors import CompileError


@dataclass(frozen=True)
class Format:
    """An 8-bit type, symmetric about 0. A scale maps a largest value of the type to a tensor's largest magnitude."""

    dtype: ir.DataType
    largest: float
    """Of an activation."""
    largest_weight: float

    def round_weight(self, scaled: NDArray[np.floating]) -> NDArray[np.generic]:
        """Round to the nearest value of the type, ties to even."""
        whole = np.rint(scaled) if self.dtype.is_integer() else scaled
        rounded: NDArray[np.generic] = np.clip(whole, -self.largest_weight, self.largest_weight)
        return rounded.astype(self.dtype.numpy(), copy=False)


INT8 = Format(ir.DataType.INT8, 127.0, 127.0)
INT8_OF_7_BITS = Format(ir.DataType.INT8, 127.0, 64.0)
"""For processors that add two products of 8 bits in 16 bits: 2 * 255 * 64 fits, and larger weights saturate."""
FP8 = Format(ir.DataType.FLOAT8E4M3FN, 448.0, 448.0)
"""4 bits of exponent and 3 of mantissa (Micikevicius et al. 2022, arXiv:2209.05433)."""


@cache
def int8() -> Format:
    """Return the format whose products this machine adds exactly."""
    return INT8_OF_7_BITS if adds_products_in_16_bits() else INT8


def write_quantized(
    source: Path,
    layers: Iterable[Layer],
    thresholds: Mapping[str, float],
    kind: Format,
    target: Path,
    shard_mb: int = MAX_SHARD_MB,
) -> None:
    """Write ``source`` with these layers quantized.

    Args:
        thresholds: the magnitude that becomes the type's largest value, by name of each quantized value.
        shard_mb: the weights above which they are in shards beside the file.

    Raises:
        CompileError: a weight is not finite. The message names it and its node.
    """
    writer = _QdqWriter(load_model(source), thresholds, kind)
    for layer in layers:
        for port in layer.activations:
            writer.quantize_activation(port)
        if layer.weight is not None:
            writer.quantize_weight(layer.weight)
    # Remove the float constants that are quantized now, and the exporter's notes, which can outgrow a small model.
    ir.passes.Sequential(RemoveUnusedNodesPass(), ClearMetadataAndDocStringPass())(writer.model)
    save_onnx(writer.model, target, shard_mb)


class _QdqWriter:
    """Adds the nodes to one model. A value that several layers read is quantized once."""

    def __init__(self, model: ir.Model, thresholds: Mapping[str, float], kind: Format) -> None:
        self.model = model
        self._thresholds = thresholds
        self._kind = kind
        self._nodes = {node.name: node for node in model.graph}
        self._activations: dict[str, ir.Value] = {}
        self._weights: dict[tuple[str, int], ir.Value] = {}

    def quantize_activation(self, port: Port) -> None:
        value = self._value(port)
        if value in self._activations.values():  # another layer has the same port
            return
        name = str(value.name)
        if name not in self._activations:
            scale = np.array(self._thresholds[name] / self._kind.largest, np.float32)
            constants = self._constants(name, scale)
            quantize = ir.node("QuantizeLinear", [value, *constants], name=f"{name}_quantize")
            quantize.outputs[0].name = f"{name}_quantized"
            dequantize = self._dequantize(name, quantize.outputs[0], constants, {})
            producer = value.producer()
            # An input of the graph has no producer, so its nodes come first.
            if producer is None:
                self.model.graph.insert_before(self.model.graph[0], [quantize, dequantize])
            else:
                self.model.graph.insert_after(producer, [quantize, dequantize])
            self._activations[name] = dequantize.outputs[0]
        self._nodes[port.node].replace_input_with(port.index, self._activations[name])

    def quantize_weight(self, weight: Weight) -> None:
        graph, value = self.model.graph, self._value(weight.port)
        # Tied weights may be read along two axes, as an embedding and as a head.
        key = (str(value.name), weight.axis)
        if key not in self._weights:
            tensor = float_weight(value)
            assert tensor is not None
            array = tensor.numpy()
            name = f"{value.name}_by_{weight.axis}"
            scale = _scales(array, weight.axis, self._kind)
            if not np.isfinite(scale).all():
                raise CompileError(f"the weights {value.name!r} of node {weight.port.node!r} are not all finite").of(
                    "weights.not_finite"
                )
            broadcast = [-1 if axis == weight.axis else 1 for axis in range(array.ndim)]
            rounded = self._kind.round_weight(array / scale.reshape(broadcast))
            quantized = add_initializer(graph, f"{name}_quantized", rounded)
            dequantize = self._dequantize(name, quantized, self._constants(name, scale), {"axis": weight.axis})
            graph.insert_before(graph[0], dequantize)
            self._weights[key] = dequantize.outputs[0]
        self._nodes[weight.port.node].replace_input_with(weight.port.index, self._weights[key])

    def _value(self, port: Port) -> ir.Value:
        value = self._nodes[port.node].inputs[port.index]
        assert value is not None
        return value

    def _constants(self, name: str, scale: NDArray[np.float32]) -> tuple[ir.Value, ir.Value]:
        """Add the scales, and as many zero points of 0."""
        graph, zeros = self.model.graph, np.zeros(scale.shape, self._kind.dtype.numpy())
        return add_initializer(graph, f"{name}_scale", scale), add_initializer(graph, f"{name}_zero_point", zeros)

    def _dequantize(
        self, name: str, given: ir.Value, constants: tuple[ir.Value, ir.Value], attributes: Mapping[str, int]
    ) -> ir.Node:
        node = ir.node("DequantizeLinear", [given, *constants], attributes, name=f"{name}_dequantize")
        node.outputs[0].name = f"{name}_dequantized"
        node.outputs[0].dtype = ir.DataType.FLOAT
        return node


def _scales(array: NDArray[np.float32], axis: int, kind: Format) -> NDArray[np.float32]:
    """Return the scale of each channel; 1 for a channel of zeros, or if its scale would underflow to 0."""
    others = tuple(other for other in range(array.ndim) if other != axis)
    largest = np.abs(array).max(axis=others)
    scales = largest / np.float32(kind.largest_weight)
    return np.where(scales < np.finfo(np.float32).tiny, np.float32(1.0), scales).astype(np.float32)
