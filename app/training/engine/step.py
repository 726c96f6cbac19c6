"""What an optimizer step takes and gives."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Beat = Callable[[str], None]
"""Is told what a worker does next."""


@dataclass(frozen=True)
class StepResult:
    """One optimizer step of one worker."""

    loss: Tensor
    """Mean loss of its micro-batches, float32 of shape ()."""
    forward_s: float
    """Seconds in the forward passes, before it waits for the others."""
