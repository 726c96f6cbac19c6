"""Export to ONNX with a dynamic batch size, and a dynamic length if the model has one."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from torch.export import ExportedProgram

from app.compile.onnx_files import save_onnx
from app.config import MAX_SHARD_MB, Precision
from app.errors import CompileError, first_line
from app.models.factory import logits_of
from app.models.precision import TORCH_DTYPES, converted_copy
from app.tensors import OUTPUT, Tensors, TensorSpec

OPSET = 20
_WEIGHTED = ("Conv", "ConvTranspose", "Gemm")
"""Operators with weights into which the exporter folds batch norms."""


def export_onnx(
    model: nn.Module,
    specs: tuple[TensorSpec, ...],
    sample: Tensors,
    path: Path,
    precision: Precision = "fp32",
    shard_mb: int = MAX_SHARD_MB,
) -> None:
    """Write ``model`` as an ONNX file with inputs ``specs`` and the output ``logits``.

    Args:
        sample: a batch of two rows or more. The exporter takes a size of 1 for a constant.
        precision: the type of the weights and of the graph, for engines that take types from the file. The inputs and
            ``logits`` have the same types in each precision.
        shard_mb: the weights above which they are in shards beside the file.

    Raises:
        CompileError: the model cannot be exported, with the exporter's reason. No file is left.
    """
    if precision != "fp32":
        model = _lowered(model, precision)
    inputs = {spec.name: torch.from_numpy(sample[spec.name]) for spec in specs}
    with _quiet():
        program = _to_onnx(_traced(model, inputs, _dynamic(specs)))
        _lower_folded_weights(program.model.graph)
        if (count := len(program.model.graph.outputs)) != 1:
            raise CompileError(f"the model has {count} outputs: expected only logits").of("outputs.count")
        save_onnx(program.model, path, shard_mb)


def trace(model: nn.Module, specs: Sequence[TensorSpec], sample: Tensors) -> ExportedProgram:
    """Return the model as one graph of operators, with the names that ``export_onnx`` notes in an ONNX file's nodes.

    Raises:
        CompileError: the model cannot be traced.
    """
    with _quiet():
        return _traced(model, {spec.name: torch.from_numpy(sample[spec.name]) for spec in specs}, _dynamic(specs))


def export_outputs(
    model: nn.Module, specs: Sequence[TensorSpec], sample: Tensors, outputs: Sequence[str], path: Path
) -> None:
    """Write a model with several outputs as a float32 ONNX file. Arguments and errors as for ``export_onnx``."""
    program = trace(model, specs, sample)
    program_to_onnx(program, [spec.name for spec in specs], outputs, path)


def program_to_onnx(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], path: Path) -> None:
    """Write a traced program as an ONNX file with these names, in its own types.

    Raises:
        CompileError: an operator has no counterpart in ONNX.
    """
    with _quiet():
        save_onnx(_to_onnx(program, outputs, inputs).model, path)


def _dynamic(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    """Return the dynamic dimensions of each input."""
    return {
        spec.name: {axis: _dimension(spec, axis) for axis, size in enumerate(spec.shape) if size == -1}
        for spec in specs
    }


def _dimension(spec: TensorSpec, axis: int) -> Any:
    """Return a dynamic dimension. Models with a table of positions cannot be traced without a maximum length."""
    return torch.export.Dim("batch") if axis == 0 else torch.export.Dim("length", max=spec.max_length)


def _traced(model: nn.Module, inputs: dict[str, torch.Tensor], dynamic: dict[str, Any]) -> ExportedProgram:
    """Trace the model into one graph of operators."""
    try:
        return torch.export.export(model, (), inputs, dynamic_shapes=dynamic)
    except Exception as error:  # of many classes, with a long message that names the line of code
        # The exporter's message is long. The line in the model's code is the useful part.
        lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
        position = next((index for index, line in enumerate(lines) if line.startswith('File "')), None)
        where = "" if position is None else f"; {' '.join(lines[position : position + 2])}"
        raise CompileError(
            f"{type(model).__name__} cannot be exported to ONNX: torch.export cannot trace it: "
            f"{first_line(error)}{where}"
        ).of("export.trace_fails") from error


def _to_onnx(
    traced: ExportedProgram, outputs: Sequence[str] = (OUTPUT,), inputs: Sequence[str] | None = None
) -> torch.onnx.ONNXProgram:
    try:
        program = torch.onnx.export(
            traced,
            dynamo=True,
            input_names=inputs,
            output_names=outputs,
            opset_version=OPSET,
            optimize=True,
            verbose=False,
        )
    except Exception as error:
        causes: list[BaseException] = [error]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        # Any of the causes may name the node. The innermost one says what is wrong.
        where = _where(traced, " ".join(map(str, causes)))
        raise CompileError(f"the model cannot be exported to ONNX: {where}{first_line(causes[-1])}").of(
            "export.fails"
        ) from error
    assert program is not None
    return program


def _where(traced: ExportedProgram, message: str) -> str:
    """Return the node that an error message names, and its innermost module, as the beginning of a sentence."""
    graphs = [traced.graph]
    with contextlib.suppress(Exception):  # it may fail as the export did
        # The node may be a part of a larger operator.
        graphs.append(traced.run_decompositions().graph)
    for graph in graphs:
        for node in graph.nodes:
            if f"%{node.name} :" in message:
                modules = list(node.meta.get("nn_module_stack", {}).values())
                path, kind = modules[-1] if modules else ("", "no module")
                return f"at node {node.name} of {path or 'the model'} ({kind}), "
    return ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's notes on operators of packages that are not installed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _lowered(model: nn.Module, precision: Precision) -> nn.Module:
    """Return a copy of ``model`` in ``precision``, which converts its float32 inputs and returns float32 logits."""
    dtype = TORCH_DTYPES[precision]

    def convert_inputs(_: nn.Module, args: tuple[()], kwargs: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
        return args, {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in kwargs.items()
        }

    def convert_output(_: nn.Module, __: tuple[()], output: object) -> torch.Tensor:
        return logits_of(output).float()

    # A copy, because the model itself is the reference and stays in float32.
    copied = converted_copy(
        model, lambda tensor: tensor.to(dtype, copy=True) if tensor.is_floating_point() else tensor.clone()
    )
    copied.register_forward_pre_hook(convert_inputs, with_kwargs=True)
    copied.register_forward_hook(convert_output)
    return copied


def _lower_folded_weights(graph: ir.Graph) -> None:
    """Convert the float32 weights of bfloat16 layers to bfloat16. Layers of mixed types do not load.

    The exporter folds batch norms into weights with NumPy, in which bfloat16 times a number is float32.
    """
    for node in graph:
        if node.op_type not in _WEIGHTED or node.inputs[0] is None or node.inputs[0].dtype != ir.DataType.BFLOAT16:
            continue
        for weight in node.inputs[1:]:
            tensor = weight.const_value if weight is not None else None
            if weight is not None and tensor is not None and tensor.dtype == ir.DataType.FLOAT:
                weight.const_value = ir.tensor(tensor.numpy().astype(ir.DataType.BFLOAT16.numpy()), name=tensor.name)
                weight.dtype = ir.DataType.BFLOAT16
