"""What an optimizer step takes and gives."""

import math
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from app.training.engine.deepspeed_config import MIN_LOSS_SCALE
from app.training.engine.loss_scale import scaler_of


@dataclass(frozen=True)
class Factors:
    """What a step multiplies with."""

    lr: float
    loss_scale: float | None
    """fp16: the factor on its losses."""

    @classmethod
    def of(cls, deepspeed: Any) -> Self:
        """Of the step that ``deepspeed``, an engine of its, does next."""
        scaler = scaler_of(deepspeed)
        return cls(lr=float(deepspeed.get_lr()[0]), loss_scale=float(scaler.cur_scale) if scaler else None)


@dataclass(frozen=True)
class StepResult:
    """One optimizer step of one worker."""

    loss: Tensor
    """Mean loss of its micro-batches, float32 of shape ()."""
    factors: Factors
    grad_norm: float | None
    """The global norm of its gradient, before clipping; None where DeepSpeed takes none."""
    is_applied: bool
    """False where the optimizer left the step out, because a number in it was not finite."""

    @classmethod
    def of(cls, deepspeed: Any, factors: Factors, loss: Tensor) -> Self:
        """The step that ``deepspeed``, an engine of its, has just done."""
        norm = deepspeed.get_global_grad_norm()
        return cls(
            loss=loss,
            factors=factors,
            grad_norm=None if norm is None else float(norm),
            is_applied=deepspeed.was_step_applied(),
        )

    @property
    def is_broken(self) -> bool:
        """Whether its gradient is not finite; by overflows fp16 finds its loss scale, as long as that can fall."""
        scale = self.factors.loss_scale
        if scale is not None and scale > MIN_LOSS_SCALE:
            return False
        return not self.is_applied or (self.grad_norm is not None and not math.isfinite(self.grad_norm))
