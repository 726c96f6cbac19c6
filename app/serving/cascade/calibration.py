"""Calibrates the thresholds of a cascade on rows with known labels.

**The test of a choice of thresholds.** Of n rows the last stage answers r correctly. Of these the cascade loses b, and
it gains c others. Let f be the floor. P(cascade correct) >= f P(last stage correct) is shown if

    r - b + c - f r - 1/2  >=  z sqrt(v),    z the normal quantile of the confidence
    v = (h + sqrt(h^2 - 4 (1 - f^2) b (r + c))) / 2 - (1 - f) (r + c),    h = (1 - f^2) r + b + c

v is the variance of the left side at equality, with the maximum-likelihood values of b and c there. This is the score
test for a ratio of proportions in matched pairs (Tang, Tang and Chan 2003, doi:10.1002/sim.1213), with a continuity
correction of 1/2. It offsets losses by gains, as accuracy does. An exact bound on b alone would pass on far more rows.
At a confidence of 0.95 its risk is at most 0.050 for floors from 0.8 to 0.999. Without gains that was computed. With
gains of up to a tenth of the rows it was found in 100,000 draws each of 300 to 10,000 rows.

**The order of tests.** Thresholds are tested from the strictest on, until the first failure. So the chosen ones hold
with the same confidence, however many are tested. This is fixed-sequence testing in "Learn then Test" (Angelopoulos et
al. 2021, arXiv:2110.01052). At step k of 20 each stage keeps the rows that it would keep if it answered k/20 of all
rows. With more than two stages, each subset of the earlier stages is a sequence of its own, and the sequences share the
risk.

The result holds for rows from the same distribution as the calibration's. Validation rows that also selected the
weights flatter the cascade and its last stage a little.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.errors import DataError
from app.serving.cascade.rule import CascadeRule, max_probability

CONFIDENCE = 0.95
_STEPS = 20
_CONTINUITY = 0.5

Thresholds = tuple[float | None, ...]


def calibrate(
    stage_logits: Sequence[NDArray[Any]],
    classes: NDArray[np.integer[Any]],
    costs: Sequence[float],
    accuracy_floor: float,
) -> CascadeRule:
    """Return the rule with the least compute among those that are shown to keep the floor.

    If none of them saves compute, every row goes to the last stage.

    Args:
        stage_logits: logits of each stage, each of shape (rows, labels), finite. The last stage is the baseline.
        classes: the correct class of each row, of shape (rows).
        costs: cost of one row in each stage, in seconds or operations, above 0.
        accuracy_floor: minimum accuracy of the cascade, as a share of the last stage's; above 0 and below 1.

    Raises:
        DataError: there are too few rows to show anything.
    """
    answers = _Answers.of(stage_logits, classes, costs)
    chains = _chains(len(costs))
    # A Bonferroni correction, because each chain is a sequence of its own.
    quantile = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / len(chains))
    _require_enough(answers, accuracy_floor, quantile)
    # The fallback that always holds: the last stage answers every row.
    best = answers.outcome((None,) * (len(costs) - 1))
    for chain in chains:
        for thresholds in answers.thresholds_of(chain):
            outcome = answers.outcome(thresholds)
            # A later success does not count, or the confidence would not hold for all tests together.
            if not outcome.shows(accuracy_floor, quantile):
                break
            best = min(best, outcome, key=lambda rule: rule.compute)
    return CascadeRule(
        thresholds=best.thresholds,
        accuracy_floor=accuracy_floor,
        confidence=CONFIDENCE,
        rows=len(classes),
        expected_accuracy=best.relative_accuracy,
        expected_shares=best.shares,
        expected_compute=best.compute,
    )


@dataclass(frozen=True)
class _Result:
    """The results of some thresholds on the calibration rows."""

    thresholds: Thresholds
    shares: tuple[float, ...]
    compute: float
    """Compute as a share of the last stage's."""

    right: int
    """Rows that the last stage answers correctly. Of these the cascade loses some, and it gains others."""
    lost: int
    gained: int

    @property
    def relative_accuracy(self) -> float:
        return (self.right - self.lost + self.gained) / self.right

    def shows(self, floor: float, quantile: float) -> bool:
        """Return whether the floor is shown to hold, by the test in the module's docstring."""
        r, b, c = self.right, self.lost, self.gained
        h = (1 - floor**2) * r + b + c
        # Rounding alone can make the difference negative.
        root = math.sqrt(max(0.0, h**2 - 4 * (1 - floor**2) * b * (r + c)))
        v = max(0.0, (h + root) / 2 - (1 - floor) * (r + c))  # as above
        return r - b + c - floor * r - _CONTINUITY >= quantile * math.sqrt(v)


@dataclass(frozen=True)
class _Answers:
    """The stages' answers to the calibration rows."""

    confidences: NDArray[np.float64]
    """Shape (stages, rows)."""

    right: NDArray[np.bool_]
    """Whether the answer is correct, shape (stages, rows)."""

    costs: NDArray[np.float64]

    @classmethod
    def of(
        cls, stage_logits: Sequence[NDArray[Any]], classes: NDArray[np.integer[Any]], costs: Sequence[float]
    ) -> "_Answers":
        return cls(
            np.stack([max_probability(logits) for logits in stage_logits]),
            np.stack([logits.argmax(-1) == classes for logits in stage_logits]),
            np.array(costs, np.float64),
        )

    def thresholds_of(self, chain: Sequence[int]) -> Iterator[Thresholds]:
        """Yield the thresholds of the stages in ``chain`` in the order of their tests. Other stages are skipped."""
        num_stages, num_rows = self.confidences.shape
        # Each step lets a stage answer another twentieth of the rows.
        ascending = np.sort(self.confidences, axis=1)
        for step in range(1, _STEPS + 1):
            index = num_rows - math.ceil(step * num_rows / _STEPS)
            yield tuple(float(ascending[stage, index]) if stage in chain else None for stage in range(num_stages - 1))

    def outcome(self, thresholds: Thresholds) -> _Result:
        stages = self._answering(thresholds)
        right, last = np.take_along_axis(self.right, stages[None], axis=0)[0], self.right[-1]
        shares = np.bincount(stages, minlength=len(self.costs)) / len(stages)
        reached = np.cumsum(shares[::-1])[::-1]  # the rows that reach each stage
        # A skipped stage costs nothing, although its rows "reach" it.
        asked = np.array([threshold is not None for threshold in thresholds] + [True])
        return _Result(
            thresholds=thresholds,
            shares=tuple(shares.tolist()),
            compute=float(self.costs[asked] @ reached[asked] / self.costs[-1]),
            right=int(last.sum()),
            lost=int((last & ~right).sum()),
            gained=int((~last & right).sum()),
        )

    def _answering(self, thresholds: Thresholds) -> NDArray[np.intp]:
        """Return the stage that answers each row."""
        stages = np.full(self.confidences.shape[1], len(thresholds))
        # From the last stage back, so that the earliest stage that is sure wins.
        for stage, threshold in reversed(list(enumerate(thresholds))):
            if threshold is not None:
                stages[self.confidences[stage] >= threshold] = stage
        return stages


def _chains(num_stages: int) -> list[tuple[int, ...]]:
    """Return every subset of the stages before the last."""
    earlier = range(num_stages - 1)
    return [chain for size in range(1, num_stages) for chain in itertools.combinations(earlier, size)]


def _require_enough(answers: _Answers, floor: float, quantile: float) -> None:
    """Raise DataError if even a cascade without losses would not pass the test on so few rows."""
    right, needed = int(answers.right[-1].sum()), _required_right(floor, quantile)
    if right < needed:
        raise DataError(
            f"a cascade is calibrated on {len(answers.right[-1]):,} validation rows, of which its last stage answers "
            f"{right:,} right: an accuracy_floor of {floor:g} takes {needed:,} at least; give more data, raise "
            "data.validation_fraction, or lower serve.cascade.accuracy_floor"
        ).of("cascade.too_few_rows")


def _required_right(floor: float, quantile: float) -> int:
    """Return the smallest r that passes the test with b = c = 0."""
    # This is the standard deviation of one row, times the quantile.
    # With b = c = 0 the test is (1 - f) r - z sqrt(f (1 - f) r) - 1/2 >= 0, a quadratic in sqrt(r).
    deviation = quantile * math.sqrt(floor * (1 - floor))
    root = (deviation + math.sqrt(deviation**2 + 4 * (1 - floor) * _CONTINUITY)) / (2 * (1 - floor))
    return math.ceil(root**2)
