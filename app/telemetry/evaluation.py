"""``evaluation.json``: what a trained model predicts of its validation split, kept for the run's page."""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from app.shared_files import KeptFile
from app.telemetry.judgement import Judgement

_BINS = 10


class WorstSample(BaseModel):
    """A sample with a high loss."""

    loss: float
    """In nats for classes; for language modelling the mean over the tokens of the block.

    For a pair of texts: InfoNCE among the positives of all evaluated pairs.
    """
    text: str | None = None
    png_base64: str | None = None
    label: str | None = None
    predicted: str | None = None
    probability: float | None = None
    """That the model gives the true label. None: the task has no single true label."""


class LabelScore(BaseModel):
    """How well a model finds one label."""

    label: str
    rows: int
    """That have the label."""
    precision: float | None
    """Share of the rows for which it is predicted that have it. None: it is never predicted."""
    recall: float | None
    """Share of the rows that have it for which it is predicted. None: no row has it."""
    f1: float
    """Harmonic mean of both; 0 if no prediction is right."""

    @classmethod
    def of(cls, label: str, right: int, predicted: int, true: int) -> Self:
        """Return the scores from the numbers of rows."""
        return cls(
            label=label,
            rows=true,
            precision=right / predicted if predicted else None,
            recall=right / true if true else None,
            f1=2 * right / (predicted + true) if right else 0.0,
        )


class ReliabilityBin(BaseModel):
    """Predictions of similar probability."""

    probability: float
    """Their mean."""
    right: float
    """Share of them that is right."""
    count: int


class Calibration(BaseModel):
    """How far the probabilities of a model are from how often it is right."""

    error: float
    """Expected calibration error (Naeini et al. 2015): the mean distance of both, weighed by the size of the bins."""
    bins: list[ReliabilityBin]
    """Of equal width, from 0 to 1. Empty ones are left out."""

    @classmethod
    def of(cls, probabilities: NDArray[Any], right: NDArray[np.bool_]) -> Self:
        """Return the calibration of predictions, by the probability of each and whether it is right."""
        numbers = np.minimum((probabilities * _BINS).astype(int), _BINS - 1)
        bins = []
        for number in range(_BINS):
            chosen = numbers == number
            if count := int(chosen.sum()):
                mean, share = float(probabilities[chosen].mean()), float(right[chosen].mean())
                bins.append(ReliabilityBin(probability=mean, right=share, count=count))
        distance = sum(part.count * abs(part.probability - part.right) for part in bins)
        return cls(error=distance / max(1, len(probabilities)), bins=bins)


class Evaluation(KeptFile):
    """What the model predicts of some or all rows of the validation split."""

    file: ClassVar[str] = "evaluation.json"
    rows: int
    """That were evaluated."""
    of: int
    """Rows of the split."""
    labels: Sequence[str] = []
    matrix: list[list[int]] | None = None
    """``matrix[i][j]``: rows of label i for which label j was predicted. None: too many labels, or none."""
    scores: list[LabelScore] = Field(default=[])
    numbers: list[tuple[float, float]] = Field(default=[])
    """Of a regression: the number of some rows, and what is predicted."""
    calibration: Calibration | None = None
    """None: the task has no probabilities."""
    worst: list[WorstSample] = Field(default=[])
    judgement: Judgement | None = None
    """None: the task has no single score, or it could not be computed."""
    skipped: str | None = None
    """Why nothing was evaluated."""

    @property
    def closing_line(self) -> str:
        """The last line of a training run's log: the verdict, or why there is none. Empty if none is expected."""
        if self.judgement:
            return f"{'warning' if self.judgement.is_void else 'verdict'}: {self.judgement.verdict}"
        return f"warning: no verdict, and no baseline was fitted: {self.skipped}" if self.skipped else ""
