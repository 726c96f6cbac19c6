"""The loss scale of fp16: the dynamic one in use, not the one of DeepSpeed's configuration, which is 0."""

from typing import Any


def scaler_of(deepspeed: Any) -> Any:
    """Whose ``cur_scale`` is the scale that ``deepspeed``, an engine of its, uses; None unless it trains in fp16."""
    if not deepspeed.fp16_enabled():
        return None
    optimizer = deepspeed.optimizer
    return getattr(optimizer, "loss_scaler", None) or optimizer.loss_scale_config  # the latter without ZeRO
