"""A model in lower precision behind the same float32 inputs and logits."""

import copy
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from app.config import Precision
from app.models.factory import logits_of
from app.models.precision import TORCH_DTYPES

_WEIGHTED = ("Conv", "ConvTranspose", "Gemm")


def lowered(model: nn.Module, precision: Precision) -> nn.Module:
    """A copy of ``model`` with weights in ``precision``, which converts what goes in and what comes out."""
    dtype = TORCH_DTYPES[precision]

    def convert_inputs(_: nn.Module, args: tuple[()], kwargs: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
        return args, {name: each.to(dtype) if each.is_floating_point() else each for name, each in kwargs.items()}

    def convert_output(_: nn.Module, __: tuple[()], output: object) -> torch.Tensor:
        return logits_of(output).float()

    copied = copy.deepcopy(model).to(dtype)
    copied.register_forward_pre_hook(convert_inputs, with_kwargs=True)
    copied.register_forward_hook(convert_output)
    return copied


def lower_folded_weights(graph: ir.Graph) -> None:
    """Convert weights of layers in bfloat16 that the exporter left in float32.

    It folds batch norms into them with numpy, where bfloat16 times a number is float32; such layers do not load.
    """
    for node in graph:
        if node.op_type not in _WEIGHTED or node.inputs[0] is None or node.inputs[0].dtype != ir.DataType.BFLOAT16:
            continue
        for weight in node.inputs[1:]:
            tensor = weight.const_value if weight is not None else None
            if weight is not None and tensor is not None and tensor.dtype == ir.DataType.FLOAT:
                weight.const_value = ir.tensor(tensor.numpy().astype(ir.DataType.BFLOAT16.numpy()), name=tensor.name)
                weight.dtype = ir.DataType.BFLOAT16
