"""What training makes small, and what validation counts."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from app.data.dataset import IGNORED
from app.models.factory import logits_of


@dataclass(frozen=True)
class Totals:
    """Sums over targets."""

    loss: float
    right: float
    count: float

    @classmethod
    def of(cls, sums: Tensor) -> Self:
        """From ``Objective.sums``, added up."""
        return cls(*sums.tolist())

    @property
    def mean_loss(self) -> float:
        """Mean loss of a target, in nats."""
        return self.loss / self.count

    @property
    def accuracy(self) -> float:
        """Share of the targets that are the model's first choice."""
        return self.right / self.count


@dataclass(frozen=True)
class Objective:
    """Cross-entropy between logits (batch, …, classes) and targets int64 (batch, …)."""

    label_smoothing: float = 0.0

    def loss(self, output: object, targets: Tensor) -> Tensor:
        """Mean loss of the targets that count, float32."""
        logits, flat = _flatten(output, targets)
        return functional.cross_entropy(logits, flat, ignore_index=IGNORED, label_smoothing=self.label_smoothing)

    def sums(self, output: object, targets: Tensor) -> Tensor:
        """Loss without smoothing, right answers and targets that count, as float64 of shape (3,)."""
        logits, flat = _flatten(output, targets)
        loss = functional.cross_entropy(logits, flat, ignore_index=IGNORED, reduction="sum").double()
        right = (logits.argmax(-1) == flat).sum()
        return torch.stack([loss, right.double(), (flat != IGNORED).sum().double()])


def _flatten(output: object, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits_of(output).float()
    return logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
