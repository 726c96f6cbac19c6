"""The rule of a cascade: which rows a stage answers itself."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict


def max_probability(logits: NDArray[Any]) -> NDArray[np.float64]:
    """The probability of the most likely label, by softmax: how sure a model is of each row.

    It tells errors from right answers about as well as measures that cost more (Hendrycks and Gimpel 2017,
    arXiv:1610.02136), and cascades do well with it (Jitkrittum et al. 2023, arXiv:2307.02764).

    Args:
        logits: of shape (rows, labels).

    Returns:
        Of shape (rows), from 1 / labels to 1; not a number where a logit is none, or infinite.
    """
    exact = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        return 1.0 / np.exp(exact - exact.max(-1, keepdims=True)).sum(-1)  # type: ignore[no-any-return]


class CascadeRule(BaseModel):
    """Thresholds, and what they were calibrated on.

    What is expected was seen on the rows of the calibration; ``app.serving.cascade.calibration`` says how far it holds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    measure: Literal["max_probability"] = "max_probability"
    """What is compared with a threshold."""

    thresholds: tuple[float | None, ...]
    """Of each stage but the last: it answers a row if it is as sure as that. None: the stage is not run."""

    floor: float
    """Least accuracy of the cascade, as a share of the last stage's."""

    risk: float
    """Probability, at most, that rows were drawn for the calibration that hide an accuracy below the floor."""

    samples: int
    """Rows of the calibration."""

    expected_accuracy: float
    """As a share of the last stage's."""

    expected_shares: tuple[float, ...]
    """Of the rows, those that each stage answers; they add up to 1."""

    expected_compute: float
    """Of all stages that a row runs through, on average, as a share of the last stage's."""

    @property
    def num_stages(self) -> int:
        """How many stages the rule is for."""
        return len(self.thresholds) + 1

    @property
    def used(self) -> list[int]:
        """The stages that run, by their place: the last one always does."""
        return [stage for stage, threshold in enumerate((*self.thresholds, 0.0)) if threshold is not None]

    def sure(self, stage: int, logits: NDArray[Any]) -> NDArray[np.bool_]:
        """Which rows a stage answers itself; the last one answers all.

        Args:
            stage: one that runs.
            logits: its answers, of shape (rows, labels).
        """
        if stage == len(self.thresholds):
            return np.ones(len(logits), np.bool_)
        threshold = self.thresholds[stage]
        assert threshold is not None
        return max_probability(logits) >= threshold  # false of what is no number

    def __str__(self) -> str:
        if len(self.used) == 1:
            return (
                f"no threshold saves anything: on {self.samples:,} rows none is shown to hold a floor of "
                f"{self.floor:g} and costs less; every row goes to the last stage"
            )
        stages = [
            f"stage {stage} answers {self.expected_shares[stage]:.1%}"
            + ("" if stage == len(self.thresholds) else f", at a probability of {self.thresholds[stage]:.4f} or more")
            for stage in self.used
        ]
        return (
            f"{'; '.join(stages)}; on {self.samples:,} rows {self.expected_accuracy:.4f} of the last stage's accuracy "
            f"at {self.expected_compute:.3f} of its compute; the floor of {self.floor:g} is missed with probability "
            f"{self.risk:g} at most"
        )
