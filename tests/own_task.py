"""A task of one's own: which of two halves of a scale a row is in, by a loss, a metric and answers of its own."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.data.tabular import TabularProcessor
from app.data.targets import Numbers, Targets
from app.tasks import Metric, ServedTask, sum_and_count


class SameSide(Metric):
    """Share of the rows on the right side of the mean."""

    name = "same_side"

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return sum_and_count((outputs[:, 0] > 0) == (targets > 0))


class AboveMean(ServedTask):
    """Whether a number is above the mean."""

    processor, targets, metrics = TabularProcessor, Numbers, (SameSide(),)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.huber_loss(outputs[:, 0], targets, reduction="none")

    def answer(self, outputs: NDArray[np.float32], targets: Targets) -> list[Mapping[str, Any]]:
        return [{"above": bool(value > 0)} for value in outputs[:, 0]]
