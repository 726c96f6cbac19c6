"""An extra model output that reports indices out of range.

Without it, Gather returns zeros for them, GatherND reads other memory, and GatherElements fails the batch.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openvino
from openvino import opset13

FAULT = "rayloom.index_fault"
"""Name of the extra output, a single bool."""

_GATHERING = ("Gather", "GatherElements", "GatherND")
_SHAPE_ONLY = ("Convert", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_SOURCES = ("Parameter", "Range")
"""Operators whose results may be indices out of range: inputs, and positions counted up to an input's length."""
_WITHOUT_VALUES = ("Constant", "ShapeOf")
"""Operators whose results do not depend on the values of inputs."""


def read_guarded(core: openvino.Core, path: Path) -> openvino.Model:
    """Read an ONNX file, and add the output ``FAULT`` if the file computes indices from its inputs or their sizes."""
    model = core.read_model(path)
    faults = list(_faults(model))
    if faults:
        fault = faults[0]
        for other in faults[1:]:
            fault = opset13.logical_or(fault, other)
        fault.output(0).get_tensor().set_names({FAULT})
        model.add_outputs([fault.output(0)])
    return model


def _faults(model: openvino.Model) -> Iterator[openvino.Node]:
    """Yield a bool for each gather by computed indices: whether one of them is out of range."""
    dependent = set[str]()
    for node in model.get_ordered_ops():
        kind, inputs = node.get_type_name(), node.input_values()
        if kind in _WITHOUT_VALUES:
            continue
        if kind in _SOURCES or any(value.get_node().get_name() in dependent for value in inputs):
            dependent.add(node.get_name())
        if kind in _GATHERING and inputs[1].get_node().get_name() in dependent and not _is_limited(node):
            yield _fault(node)


def _is_limited(node: openvino.Node) -> bool:
    """Return whether ``TensorSpec.values_below`` already limits the indices: an unchanged input indexes a constant."""
    table, indices = node.input_values()[:2]
    return bool(
        node.get_type_name() == "Gather" and table.get_node().get_type_name() == "Constant" and _is_input(indices)
    )


def _is_input(value: openvino.Output) -> bool:
    """Return whether a value is an unchanged input."""
    node = value.get_node()
    while node.get_type_name() in _SHAPE_ONLY:
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Parameter")


def _sizes(node: openvino.Node) -> openvino.Node:
    """Return the exclusive upper bounds of indices: one, or for GatherND one for each entry of the last axis."""
    indices = node.input_value(1)
    if node.get_type_name() == "GatherND":
        first = int(node.get_attributes()["batch_dims"])
        axes = list(range(first, first + indices.get_partial_shape()[-1].get_length()))
    elif node.get_type_name() == "GatherElements":
        axes = [int(node.get_attributes()["axis"])]
    else:
        axes = [node.input_value(2).get_node().get_data().item()]
    return opset13.gather(
        opset13.shape_of(node.input_value(0), "i64"), opset13.constant(np.array(axes)), opset13.constant(0)
    )


def _fault(node: openvino.Node) -> openvino.Node:
    """Return a node that tells whether an index is out of range. GatherND and GatherElements read index 0 instead."""
    indices, sizes = node.input_value(1), _sizes(node)
    rows = opset13.reshape(
        opset13.convert(indices, "i64"), opset13.constant(np.array([-1, sizes.get_output_shape(0)[0]])), False
    )
    is_outside = opset13.logical_or(opset13.less(rows, opset13.negative(sizes)), opset13.greater_equal(rows, sizes))
    if node.get_type_name() != "Gather":
        inside = opset13.select(is_outside, opset13.constant(np.int64(0)), rows)
        node.input(1).replace_source_output(opset13.reshape(inside, opset13.shape_of(indices), False).output(0))
    return opset13.reduce_logical_or(is_outside, opset13.constant(np.array([0, 1])), False)
