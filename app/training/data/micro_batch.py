"""A micro-batch as the model takes it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from app.config import TrainConfig
from app.models.precision import TORCH_DTYPES


@dataclass(frozen=True)
class MicroBatch:
    """The model's inputs by name, and int64 targets of shape (batch, …)."""

    inputs: dict[str, Tensor]
    targets: Tensor

    def to(self, device: torch.device, config: TrainConfig) -> "MicroBatch":
        """On ``device``, numbers with a fraction in the precision of training."""
        dtype = TORCH_DTYPES[config.precision]
        inputs = {
            name: tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)
            for name, tensor in self.inputs.items()
        }
        return MicroBatch(inputs, self.targets.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        """In page-locked memory, from which a GPU copies while it computes; torch's loader calls it."""
        inputs = {name: tensor.pin_memory() for name, tensor in self.inputs.items()}
        return MicroBatch(inputs, self.targets.pin_memory())
