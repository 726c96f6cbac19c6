"""Regression: each text or row of a table has a number."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from app.data.tabular import TabularProcessor
from app.data.targets import ROUNDING, Answer, Numbers, Outputs
from app.data.text import TextProcessor
from app.tasks.agreement import same_answer
from app.tasks.base import ServedTask
from app.tasks.features import MODEL, PREPARED, ROWS, TEXTS
from app.tasks.metrics import Metric, sum_and_count

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class _Error(Metric):
    """An error in the unit of the numbers. ``scale`` is the deviation by which targets were divided."""

    mode = "min"
    scale: float = 1.0

    def bind(self, targets: Outputs) -> Self:
        """Return the metric in the unit of these numbers."""
        assert isinstance(targets, Numbers)
        return type(self)(targets.scale.std)


class MeanAbsoluteError(_Error):
    """Mean of the absolute differences."""

    name = "mae"

    def sums(self, outputs: "Tensor", targets: "Tensor") -> "Tensor":
        differences = (outputs[:, 0] - targets).abs().double() * self.scale
        return sum_and_count(differences)


class RootMeanSquaredError(_Error):
    """Root of the mean of the squared differences."""

    name = "rmse"

    def sums(self, outputs: "Tensor", targets: "Tensor") -> "Tensor":
        differences = (outputs[:, 0] - targets).double() * self.scale
        return sum_and_count(differences.square())

    def value(self, sums: "Tensor") -> float:
        return math.sqrt(super().value(sums))


class RSquared(Metric):
    """Coefficient of determination: 1 less the squared error as a share of the variance."""

    name = "r2"
    size = 4

    def sums(self, outputs: "Tensor", targets: "Tensor") -> "Tensor":
        """Return the squared error, the number of rows, and the sums of targets and of their squares."""
        import torch

        given, expected = outputs[:, 0].double(), targets.double()
        return torch.cat(
            [
                sum_and_count((given - expected).square()),
                torch.stack([expected.sum(), expected.square().sum()]),
            ]
        )

    def value(self, sums: "Tensor") -> float:
        error, count, total, squares = sums.tolist()
        variance = squares - total**2 / count if count else 0.0
        return 1.0 - error / variance if variance > ROUNDING * squares else math.nan


class Regression(ServedTask):
    """A number for each input, by the squared error. Subclasses name the processor of the inputs."""

    targets = Numbers
    metrics = (MeanAbsoluteError(), RootMeanSquaredError(), RSquared())

    def loss(self, outputs: "Tensor", targets: "Tensor") -> "Tensor":
        return (outputs[:, 0] - targets).square()

    def agrees(self, ours: Answer, theirs: Answer, targets: Outputs) -> bool:
        """Compare with the scale of the targets as the unit, because 1 % of a number near 0 is too strict."""
        assert isinstance(targets, Numbers)
        return same_answer(ours, theirs, targets.scale.std)


class TextRegression(Regression):
    """Texts, each with a number."""

    processor = TextProcessor
    supports = PREPARED | MODEL | TEXTS


class TabularRegression(Regression):
    """Rows of a table, each with a number."""

    processor = TabularProcessor
    supports = PREPARED | MODEL | ROWS | {"linear baseline"}
