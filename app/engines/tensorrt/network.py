"""An ONNX file as TensorRT reads it, and the names, types and shapes that only this reading tells without a GPU."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.engines.tensorrt.library import Library
from app.errors import CompileError
from app.tensors import Dtype, Tensor

_DTYPES: dict[str, Dtype] = {
    "FLOAT": "float32",
    "HALF": "float16",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}


@dataclass(frozen=True)
class Network:
    """A parsed file; ``definition`` is the library's."""

    definition: Any
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def parse_network(library: Library, builder: Any, onnx: Path) -> Network:
    """Read an ONNX file, whose types hold: nothing is computed in others.

    Raises:
        CompileError: it does not parse, or an input or output is not one that engines take; it is named.
    """
    trt = library.trt
    definition = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(definition, library.logger)
    if not parser.parse_from_file(str(onnx)):
        raise CompileError(f"{library.flavour} cannot parse {str(onnx)!r}: {_problems(parser)}")
    return Network(
        definition,
        tuple(_tensor(definition.get_input(index)) for index in range(definition.num_inputs)),
        tuple(_tensor(definition.get_output(index)) for index in range(definition.num_outputs)),
    )


def _problems(parser: Any) -> str:
    problems = [parser.get_error(index) for index in range(parser.num_errors)]
    return "; ".join(
        f"node {each.node_name()!r} ({each.node_operator()}): {each.desc()}" if each.node_name() else each.desc()
        for each in problems
    )


def _tensor(tensor: Any) -> Tensor:
    shape = tuple(tensor.shape)
    if tensor.dtype.name not in _DTYPES:
        raise CompileError(
            f"{tensor.name!r} is {tensor.dtype.name}, which numpy has not: cast it to float32 in the ONNX file"
        )
    if shape[:1] != (-1,) or tensor.is_shape_tensor:
        raise CompileError(
            f"{tensor.name!r} has shape {list(shape)}: expected rows that vary, -1, in front; "
            "export the model with a dynamic batch"
        )
    return Tensor(name=tensor.name, dtype=_DTYPES[tensor.dtype.name], shape=shape)
