"""The rule of a cascade: which rows a stage answers itself."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict


def max_probability(logits: NDArray[Any]) -> NDArray[np.float64]:
    """The probability of the most likely label, by softmax: how sure a model is of each row.

    It tells errors from right answers about as well as measures that cost more (Hendrycks and Gimpel 2017,
    arXiv:1610.02136), and cascades do well with it (Jitkrittum et al. 2023, arXiv:2307.02764).

    Args:
        logits: of shape (rows, labels), finite.

    Returns:
        Of shape (rows), from 1 / labels to 1.
    """
    exact = logits.astype(np.float64)
    return 1.0 / np.exp(exact - exact.max(-1, keepdims=True)).sum(-1)  # type: ignore[no-any-return]


class CascadeRule(BaseModel):
    """Thresholds, and what they were calibrated on.

    What is expected was seen on the rows of the calibration; ``app.serving.cascade.calibration`` says how far it holds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    thresholds: tuple[float | None, ...]
    """Of each stage but the last: it answers a row of which it is as sure as that. None: the stage is not asked."""

    accuracy_floor: float
    """Least accuracy of the cascade, as a share of the last stage's."""

    confidence: float
    """Probability, at least, that the rows of the calibration were drawn such that the floor holds."""

    rows: int
    """Of the calibration."""

    expected_accuracy: float
    """As a share of the last stage's."""

    expected_shares: tuple[float, ...]
    """Of the rows, those that each stage answers; they add up to 1."""

    expected_compute: float
    """Of all stages that a row goes through, on average, as a share of the last stage's."""

    @property
    def asked(self) -> list[int]:
        """The stages that are asked, by their place: the last one always is."""
        return [stage for stage, threshold in enumerate((*self.thresholds, 0.0)) if threshold is not None]

    def is_sure(self, stage: int, logits: NDArray[Any]) -> NDArray[np.bool_]:
        """Which rows a stage answers itself; the last one answers all.

        Args:
            stage: one that is asked.
            logits: its answers, of shape (rows, labels), finite.
        """
        threshold = (*self.thresholds, 0.0)[stage]
        assert threshold is not None
        return max_probability(logits) >= threshold

    def summary(self, titles: Sequence[str]) -> str:
        """What to expect, in lines for people; ``titles`` are those of the stages."""
        *_, last = titles
        if len(self.asked) == 1:
            return (
                f"no threshold pays: on {self.rows:,} validation rows none is shown to keep {self.accuracy_floor:g} of "
                f"the accuracy of {last} and saves compute; {last} answers every row"
            )
        lines = [
            f"  {titles[stage]} answers {self.expected_shares[stage]:.1%}"
            + ("" if stage == len(self.thresholds) else f", with a probability of {self.thresholds[stage]:.4f} or more")
            for stage in self.asked
        ]
        return "\n".join(
            [
                f"a cascade, calibrated on {self.rows:,} validation rows:",
                *lines,
                f"  there {self.expected_accuracy:.4f} of the accuracy of {last}, for {self.expected_compute:.3f} of "
                "its compute",
                f"  elsewhere {self.accuracy_floor:g} of its accuracy or more, with confidence {self.confidence:g}",
            ]
        )
