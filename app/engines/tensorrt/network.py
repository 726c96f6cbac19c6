"""ONNX files as TensorRT parses them. Without a GPU, only the parser tells the names, types and shapes."""

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
    """A parsed file. ``definition`` is the library's object."""

    definition: Any
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def parse_network(library: Library, builder: Any, onnx: Path) -> Network:
    """Parse an ONNX file. The network is strongly typed: its computation follows the file's types.

    Raises:
        CompileError: it does not parse, or engines do not take the type of an input or output; it is named.
    """
    trt = library.trt
    definition = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(definition, library.logger)
    if not parser.parse_from_file(str(onnx)):
        raise CompileError(f"{library.flavour} cannot parse {str(onnx)!r}: {_problems(parser)}").of(
            "tensorrt.parse_fails"
        )
    return Network(
        definition,
        tuple(_tensor(definition.get_input(index)) for index in range(definition.num_inputs)),
        tuple(_tensor(definition.get_output(index)) for index in range(definition.num_outputs)),
    )


def _problems(parser: Any) -> str:
    problems = [parser.get_error(index) for index in range(parser.num_errors)]
    return "; ".join(
        f"node {error.node_name()!r} ({error.node_operator()}): {error.desc()}" if error.node_name() else error.desc()
        for error in problems
    )


def _tensor(tensor: Any) -> Tensor:
    shape = tuple(tensor.shape)
    if tensor.dtype.name not in _DTYPES:
        raise CompileError(
            f"{tensor.name!r} is {tensor.dtype.name}, which numpy lacks: cast it to float32 in the ONNX file"
        ).of("dtype.unsupported")
    if shape[:1] != (-1,) or tensor.is_shape_tensor:
        raise CompileError(
            f"{tensor.name!r} has shape {list(shape)}: expected rows that vary, -1, in front; "
            "export the model with a dynamic batch"
        ).of("rows.not_first")
    return Tensor(name=tensor.name, dtype=_DTYPES[tensor.dtype.name], shape=shape)
