"""What an optimizer step gives."""

from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """One optimizer step of one worker."""

    loss: Tensor
    """Mean loss of its micro-batches, float32 of shape ()."""
    lr: float
    """The rate of this step."""
    grad_norm: float
    """The global norm of its gradient, before clipping."""
    loss_scale: float | None
    """fp16: what the next losses are multiplied with."""
    is_applied: bool
    """False where the optimizer left the step out, because a number in it was not finite."""

    @classmethod
    def of(cls, deepspeed: Any, lr: float, loss: Tensor) -> Self:
        """The step that ``deepspeed``, an engine of its, has just done."""
        return cls(
            loss=loss,
            lr=lr,
            grad_norm=float(deepspeed.get_global_grad_norm() or 0.0),
            loss_scale=float(deepspeed.loss_scale()) if deepspeed.fp16_enabled() else None,
            is_applied=deepspeed.was_step_applied(),
        )


def learning_rate(deepspeed: Any) -> float:
    """The rate of the step to come."""
    return float(deepspeed.get_lr()[0])
