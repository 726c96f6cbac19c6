"""Numeric precision in PyTorch: the dtypes of the recipe's precisions, and TF32."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def allow_tf32(allowed: bool) -> None:
    """Set for the whole process whether NVIDIA GPUs multiply float32 with TF32's 10 bits of mantissa.

    Training allows TF32 in matrix products and convolutions: it is several times faster. Inference never allows it:
    outputs must pass gates of 1e-4, which TF32 would fail. PyTorch's default differs from both: TF32 in convolutions
    only.
    """
    torch.backends.cudnn.allow_tf32 = allowed
    torch.set_float32_matmul_precision("high" if allowed else "highest")


def converted_copy(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy with each parameter and buffer converted, by a function that never returns its argument.

    Unlike a copy that is converted afterwards, it never has all weights twice in their first type.
    """
    memo: dict[int, Tensor] = {id(buffer): convert(buffer) for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(convert(parameter.detach()), parameter.requires_grad)
    return copy.deepcopy(model, memo)
