"""One optimizer step: its factors and its result."""

import math
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from app.training.engine.deepspeed_engine import MIN_LOSS_SCALE
from app.training.engine.deepspeed_internals import loss_scale_of


@dataclass(frozen=True)
class Factors:
    """The factors of one step."""

    lr: float
    """Learning rate."""
    loss_scale: float | None
    """fp16: the factor of its losses."""

    @classmethod
    def of(cls, engine: Any) -> Self:
        """Return the factors of the next step of ``engine``, a ``DeepSpeedEngine``."""
        scale = loss_scale_of(engine)
        return cls(lr=float(engine.get_lr()[0]), loss_scale=scale.scale if scale else None)


@dataclass(frozen=True)
class StepResult:
    """One optimizer step of one worker."""

    loss: Tensor
    """Mean loss of its micro-batches, float32 of shape ()."""
    factors: Factors
    grad_norm: float | None
    """Global norm of the gradient before clipping. None if DeepSpeed computes none."""
    is_applied: bool
    """False if the optimizer skipped the step, because a gradient was not finite."""

    @classmethod
    def of(cls, engine: Any, factors: Factors, loss: Tensor) -> Self:
        """Return the result of the last step of ``engine``, a ``DeepSpeedEngine``."""
        norm = engine.get_global_grad_norm()
        return cls(
            loss=loss,
            factors=factors,
            grad_norm=None if norm is None else float(norm),
            is_applied=engine.was_step_applied(),
        )

    @property
    def is_broken(self) -> bool:
        """Whether its gradient is not finite.

        fp16 finds its loss scale by overflows, so there an overflow counts only at the minimum scale.
        """
        scale = self.factors.loss_scale
        if scale is not None and scale > MIN_LOSS_SCALE:
            return False
        return not self.is_applied or (self.grad_norm is not None and not math.isfinite(self.grad_norm))
