"""Metrics: numbers that a model is judged by, made of sums that add up over batches and ranks."""

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from app.config.metrics import Mode
from app.data.prepared import IGNORED
from app.data.targets import Outputs

if TYPE_CHECKING:  # an endpoint names a task without torch
    from torch import Tensor


class Metric(ABC):
    """A number that a model is judged by. Sums over disjoint rows add up to the sums over all of them."""

    name: ClassVar[str]
    """Lower-case, with underscores. Records and recipes call it ``val_NAME``."""

    mode: ClassVar[Mode] = "max"
    """Whether more or less of it is better."""

    of_loss: ClassVar[bool] = False
    """Whether a validation takes the loss's sums for this metric, because they are the same as its own."""

    size: int = 2
    """The number of sums."""

    def bind(self, targets: Outputs) -> "Metric":  # noqa: ARG002
        """Return the metric for these targets, if it depends on their labels or scale."""
        return self

    @abstractmethod
    def sums(self, outputs: "Tensor", targets: "Tensor") -> "Tensor":
        """Return sums over rows, of shape (``size``,), on the device of ``outputs``.

        Args:
            outputs: what the model returned, float32 of shape (rows, …). There may be no row.
            targets: the targets of these rows.
        """

    def value(self, sums: "Tensor") -> float:
        """Return the metric over all rows, from their ``sums``. NaN if there is no row.

        By default it is the first sum divided by the second.
        """
        total, count = sums.tolist()
        return float(total / count) if count else math.nan

    def drop(self, before: float, after: float) -> float:
        """Return how much worse ``after`` is, for the gates: of an error (mode ``min``) as a share of it."""
        if self.mode == "max":
            return before - after
        if not before:
            return math.copysign(math.inf, after) if after else 0.0
        return (after - before) / abs(before)


def sum_and_count(values: "Tensor") -> "Tensor":
    """Return the sum of a value of each row and the number of rows, of shape (2,), from which ``value`` is the mean."""
    import torch

    return torch.stack([values.double().sum(), values.new_tensor(len(values), dtype=torch.float64)])


class Accuracy(Metric):
    """Share of the targets that are the model's first choice: a class of each row, or of each of its tokens."""

    name = "accuracy"

    def sums(self, outputs: "Tensor", targets: "Tensor") -> "Tensor":
        import torch

        correct = (outputs.argmax(-1) == targets).sum()  # no class is ``IGNORED``
        return torch.stack([correct, (targets != IGNORED).sum()])
