"""Small ONNX files, written node by node."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

Shape = Sequence[int | str]


def save_onnx(
    path: Path,
    nodes: Sequence[NodeProto],
    constants: Mapping[str, NDArray[Any]] | None = None,
    shape: Shape = ("rows", 2),
    answered: Shape | None = None,
    dtype: int = TensorProto.FLOAT,
) -> Path:
    """Write a model from ``given`` of ``shape`` to what the last node gives, of the same shape or of ``answered``."""
    given = helper.make_tensor_value_info("given", dtype, shape)
    answer = helper.make_tensor_value_info(nodes[-1].output[0], dtype, answered or shape)
    initializers = [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(nodes, "g", [given], [answer], initializers)
    domains = [helper.make_opsetid(domain, 1) for domain in {node.domain for node in nodes} - {""}]
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), *domains], ir_version=10), path)
    return path
