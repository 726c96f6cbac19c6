"""The rule of a cascade, which decides the rows that each stage answers itself."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict


def max_probability(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Return the softmax probability of the most likely label, as the model's confidence in each row.

    It separates errors from correct answers about as well as more expensive measures (Hendrycks and Gimpel 2017,
    arXiv:1610.02136), and works well in cascades (Jitkrittum et al. 2023, arXiv:2307.02764).

    Args:
        logits: shape (rows, labels), finite.

    Returns:
        Shape (rows), from 1 / labels to 1.
    """
    exact = logits.astype(np.float64)
    # The largest logit has the term 1, and no term overflows.
    return 1.0 / np.exp(exact - exact.max(-1, keepdims=True)).sum(-1)  # type: ignore[no-any-return]


class CascadeRule(BaseModel):
    """The thresholds of a cascade, and the results of their calibration.

    Expected values were seen on the calibration rows. ``app.serving.cascade.calibration`` says how far they hold.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    thresholds: tuple[float | None, ...]
    """The minimum confidence with which each stage but the last answers a row itself. None: the stage is skipped."""

    accuracy_floor: float
    """Minimum accuracy of the cascade, as a share of the last stage's."""

    confidence: float
    """Minimum probability of calibration rows for which the floor holds."""

    rows: int
    """The number of calibration rows."""

    expected_accuracy: float
    """Accuracy as a share of the last stage's."""

    expected_shares: tuple[float, ...]
    """The share of rows that each stage answers. They add up to 1."""

    expected_compute: float
    """Mean compute of all stages that a row passes, as a share of the last stage's."""

    @property
    def asked(self) -> list[int]:
        """The indices of the stages that are not skipped. They include the last one."""
        return [stage for stage, threshold in enumerate((*self.thresholds, 0.0)) if threshold is not None]

    def is_sure(self, stage: int, logits: NDArray[Any]) -> NDArray[np.bool_]:
        """Return the mask of the rows that a stage answers itself. The last stage answers all.

        Args:
            stage: a stage that is not skipped.
            logits: its answers, shape (rows, labels), finite.
        """
        threshold = (*self.thresholds, 0.0)[stage]
        assert threshold is not None
        return max_probability(logits) >= threshold

    def summary(self, titles: Sequence[str]) -> str:
        """Return a summary of the expected results, in lines for people. ``titles`` name the stages."""
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
