"""The float32 copies from which DeepSpeed, without ZeRO, updates parameters of a lower precision."""

from typing import Any

from torch import Tensor


def master_pairs(optimizer: Any) -> list[tuple[Tensor, Tensor]]:
    """Each parameter of the model with its float32 copy in DeepSpeed's ``optimizer``; none where it keeps no copies."""
    if not hasattr(optimizer, "fp32_groups"):
        return []
    groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    return [pair for lows, masters in groups for pair in zip(lows, masters, strict=True)]
