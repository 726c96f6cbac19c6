"""An extra model output that reports indices out of range. OpenVINO itself would read zeros there."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openvino
from openvino import opset13

FAULT = "rayloom.index_fault"
"""Name of the extra output, a single bool."""

_GATHERING = ("Gather", "GatherElements")
_SHAPE_ONLY = ("Convert", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_WITHOUT_VALUES = ("Constant", "ShapeOf")
"""Operators whose results do not depend on the values of inputs."""


def read_guarded(core: openvino.Core, path: Path) -> openvino.Model:
    """Read an ONNX file, and add the output ``FAULT`` if the file computes indices from its inputs."""
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
        if kind == "Parameter" or any(value.get_node().get_name() in dependent for value in inputs):
            dependent.add(node.get_name())
        is_computed = kind in _GATHERING and inputs[1].get_node().get_name() in dependent
        if is_computed and not (_is_input(inputs[1]) and inputs[0].get_node().get_type_name() == "Constant"):
            yield _fault(inputs[0], inputs[1], _axis_of(node))


def _is_input(value: openvino.Output) -> bool:
    """Return whether indices are an unchanged input, whose values ``TensorSpec.values_below`` limits already."""
    node = value.get_node()
    while node.get_type_name() in _SHAPE_ONLY:
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Parameter")


def _axis_of(node: openvino.Node) -> int:
    if node.get_type_name() == "GatherElements":
        return int(node.get_attributes()["axis"])
    axis: int = node.input_value(2).get_node().get_data().item()
    return axis


def _fault(data: openvino.Output, indices: openvino.Output, axis: int) -> openvino.Node:
    whole = opset13.constant(0)
    size = opset13.gather(opset13.shape_of(data, "i64"), opset13.constant(axis), whole)
    flat = opset13.reshape(opset13.convert(indices, "i64"), opset13.constant(np.array([-1])), False)
    is_outside = opset13.logical_or(opset13.less(flat, opset13.negative(size)), opset13.greater_equal(flat, size))
    return opset13.reduce_logical_or(is_outside, whole, False)
