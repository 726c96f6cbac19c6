"""Export to ONNX with a dynamic batch, and length where there is one."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from app.compile.lowering import lower_folded_weights, lowered
from app.config import Precision
from app.errors import CompileError
from app.tensors import Tensors, TensorSpec

OPSET = 20
OUTPUT = "logits"


def export_onnx(
    model: nn.Module, specs: tuple[TensorSpec, ...], sample: Tensors, path: Path, precision: Precision = "fp32"
) -> None:
    """Write ``model`` as one ONNX file with inputs ``specs`` and the output ``logits``.

    Args:
        sample: a batch of two rows or more; a size of 1 would be taken for a constant.
        precision: what weights are and the graph computes in, for engines that take types from the file; inputs and
            ``logits`` are the same in all.

    Raises:
        CompileError: the model cannot be exported; the exporter's reason is in the message.
    """
    if precision != "fp32":
        model = lowered(model, precision)
    inputs = {spec.name: torch.from_numpy(sample[spec.name]) for spec in specs}
    names = ("batch", "length")
    dynamic = {
        spec.name: {axis: torch.export.Dim(names[axis]) for axis, size in enumerate(spec.shape) if size == -1}
        for spec in specs
    }
    try:
        with _quiet():
            program = torch.onnx.export(
                model,
                kwargs=inputs,
                dynamo=True,
                dynamic_shapes=dynamic,
                input_names=list(inputs),
                output_names=[OUTPUT],
                opset_version=OPSET,
                verbose=False,
            )
            assert program is not None
            lower_folded_weights(program.model.graph)
            program.save(path, external_data=False)
    except Exception as error:  # the exporter has many error classes; the cause says what is wrong
        raise CompileError(f"the model cannot be exported to ONNX: {error.__cause__ or error}") from error
    if (count := len(program.model.graph.outputs)) != 1:
        raise CompileError(f"the model answers {count} tensors: expected logits alone")


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
