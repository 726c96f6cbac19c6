"""Export to ONNX with a dynamic batch, and length where there is one."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from app.compile.lowering import lower_folded_weights, lowered
from app.config import Precision
from app.errors import CompileError
from app.tensors import OUTPUT, Tensors, TensorSpec

OPSET = 20

_MOST_GIB = 1.5
"""Of weights, above which PyTorch writes them beside the file; no file in protobuf's format has more than 2 GiB."""


def export_onnx(
    model: nn.Module, specs: tuple[TensorSpec, ...], sample: Tensors, path: Path, precision: Precision = "fp32"
) -> None:
    """Write ``model`` as one ONNX file with inputs ``specs`` and the output ``logits``.

    Args:
        sample: a batch of two rows or more; a size of 1 would be taken for a constant.
        precision: what weights are and the graph computes in, for engines that take types from the file; inputs and
            ``logits`` are the same in all.

    Raises:
        CompileError: the model cannot be exported, the exporter's reason is in the message; or it has more weights than
            one ONNX file takes, and nothing is left of it.
    """
    if precision != "fp32":
        model = lowered(model, precision)
    inputs = {spec.name: torch.from_numpy(sample[spec.name]) for spec in specs}
    dynamic = {
        spec.name: {axis: _dimension(spec, axis) for axis, size in enumerate(spec.shape) if size == -1}
        for spec in specs
    }
    with _quiet():
        program = _to_onnx(_traced(model, inputs, dynamic))
        lower_folded_weights(program.model.graph)
        if (count := len(program.model.graph.outputs)) != 1:
            raise CompileError(f"the model answers {count} tensors: expected logits alone")
        program.save(path, external_data=False)
    _require_one_file(path)


def _dimension(spec: TensorSpec, axis: int) -> Any:
    """A size that varies. Models with a table of positions cannot be traced for lengths without a bound."""
    return torch.export.Dim("batch") if axis == 0 else torch.export.Dim("length", max=spec.longest)


def _traced(model: nn.Module, inputs: dict[str, torch.Tensor], dynamic: dict[str, Any]) -> ExportedProgram:
    """The model as one graph of operators."""
    try:
        return torch.export.export(model, (), inputs, dynamic_shapes=dynamic)
    except Exception as error:  # of many classes; what it says is long, and ends with the line of code
        said = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
        place = next((index for index, line in enumerate(said) if line.startswith('File "')), None)
        where = "" if place is None else f"; {' '.join(said[place : place + 2])}"
        raise CompileError(
            f"{type(model).__name__} cannot be exported to ONNX: torch.export cannot trace it: "
            f"{_first_line(error)}{where}"
        ) from error


def _to_onnx(traced: ExportedProgram) -> torch.onnx.ONNXProgram:
    try:
        program = torch.onnx.export(
            traced, dynamo=True, output_names=[OUTPUT], opset_version=OPSET, optimize=True, verbose=False
        )
    except Exception as error:
        causes: list[BaseException] = [error]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        where = _where(traced, " ".join(map(str, causes)))
        raise CompileError(f"the model cannot be exported to ONNX: {where}{_first_line(causes[-1])}") from error
    assert program is not None
    return program


def _where(traced: ExportedProgram, message: str) -> str:
    """The node that a message is on and the innermost module that it is of, as the beginning of a sentence."""
    graphs = [traced.graph]
    with contextlib.suppress(Exception):  # it may fail as the export did
        graphs.append(traced.run_decompositions().graph)  # what has no translation may come of a larger operator
    for graph in graphs:
        for node in graph.nodes:
            if f"%{node.name} :" in message:
                modules = list(node.meta.get("nn_module_stack", {}).values())
                path, kind = modules[-1] if modules else ("", "no module")
                return f"at node {node.name} of {path or 'the model'} ({kind}), "
    return ""


def _first_line(error: BaseException) -> str:
    """Of what it says; its class if it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _require_one_file(path: Path) -> None:
    """Refuse weights beside the file: it is judged, hashed and published by itself, and would be without them."""
    weights = path.with_name(f"{path.name}.data")
    if not weights.exists():
        return
    size_gib = weights.stat().st_size / 2**30
    weights.unlink()
    path.unlink()
    raise CompileError(
        f"the model has {size_gib:.2f} GiB of weights, and one ONNX file takes {_MOST_GIB} GiB: give a smaller model "
        "(model.args)"
    )


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
