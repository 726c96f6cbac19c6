"""Finding the thresholds of a cascade, on rows whose labels are known.

**What is shown of every threshold that is taken.** Of n rows the last stage answers r right; of these the cascade
loses b, and it gains c others. That in the long run P(cascade right) >= f P(last stage right), f the floor, is shown if

    r - b + c - f r - 1/2  >=  z sqrt(v),    z the normal quantile of the confidence
    v = (h + sqrt(h^2 - 4 (1 - f^2) b (r + c))) / 2 - (1 - f) (r + c),    h = (1 - f^2) r + b + c

v is the variance of the left side where the two probabilities are just equal, with the likeliest ones of b and c
there: the score test of a ratio of proportions in matched pairs (Tang, Tang and Chan 2003, doi:10.1002/sim.1213), with
a correction for continuity of 1/2. It counts gains against losses, as accuracy does; the exact bound of b alone would
send far more rows on. Its risk at a confidence of 0.95 is 0.050 at most, for floors from 0.8 to 0.999: computed where
nothing is gained, else found in 100,000 draws each of 300 to 10,000 rows with gains of up to a tenth of them.

**In which order.** Thresholds are tried from the strictest on, and the first that fails ends it: so many may be tried,
and the one that is taken still holds with the same confidence. This is fixed-sequence testing in "Learn then Test"
(Angelopoulos et al. 2021, arXiv:2110.01052). At step k of 20 each stage keeps what it would keep if it answered k/20 of
all rows. Where there are more than two stages, every choice of those that are asked is a sequence of its own, and the
sequences share the risk.

It holds for rows that are drawn as those of the calibration were. Validation rows by which the weights were
chosen are a little too kind to both, the cascade and its last stage.
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
    """The rule of least compute among those that are shown to hold the floor.

    If none of them saves anything, every row goes to the last stage.

    Args:
        stage_logits: of each stage, the last one being the one to compare with; each of shape (rows, labels), finite.
        classes: the right one of each row, of shape (rows).
        costs: of one row in each stage, in seconds or operations, above 0.
        accuracy_floor: of the cascade, as a share of the last stage's; above 0 and below 1.

    Raises:
        DataError: there are too few rows to show anything.
    """
    seen = _Seen.of(stage_logits, classes, costs)
    chains = _chains(len(costs))
    quantile = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / len(chains))
    _require_enough(seen, accuracy_floor, quantile)
    best = seen.outcome((None,) * (len(costs) - 1))
    for chain in chains:
        for thresholds in seen.thresholds_of(chain):
            outcome = seen.outcome(thresholds)
            if not outcome.shows(accuracy_floor, quantile):
                break
            best = min(best, outcome, key=lambda each: each.compute)
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
class _Outcome:
    """What becomes of the rows of the calibration under some thresholds."""

    thresholds: Thresholds
    shares: tuple[float, ...]
    compute: float
    """As a share of the last stage's."""

    right: int
    """Rows that the last stage answers right: of these the cascade loses some, and it gains others."""
    lost: int
    gained: int

    @property
    def relative_accuracy(self) -> float:
        return (self.right - self.lost + self.gained) / self.right

    def shows(self, floor: float, quantile: float) -> bool:
        """Whether the floor is shown to hold; the module says how."""
        r, b, c = self.right, self.lost, self.gained
        h = (1 - floor**2) * r + b + c
        root = math.sqrt(max(0.0, h**2 - 4 * (1 - floor**2) * b * (r + c)))  # below 0 by rounding alone
        v = max(0.0, (h + root) / 2 - (1 - floor) * (r + c))  # likewise
        return r - b + c - floor * r - _CONTINUITY >= quantile * math.sqrt(v)


@dataclass(frozen=True)
class _Seen:
    """What the stages make of the rows."""

    confidences: NDArray[np.float64]
    """Of shape (stages, rows)."""

    right: NDArray[np.bool_]
    """Of shape (stages, rows)."""

    costs: NDArray[np.float64]

    @classmethod
    def of(
        cls, stage_logits: Sequence[NDArray[Any]], classes: NDArray[np.integer[Any]], costs: Sequence[float]
    ) -> "_Seen":
        return cls(
            np.stack([max_probability(logits) for logits in stage_logits]),
            np.stack([logits.argmax(-1) == classes for logits in stage_logits]),
            np.array(costs, np.float64),
        )

    def thresholds_of(self, chain: Sequence[int]) -> Iterator[Thresholds]:
        """The sequence in which thresholds of the stages of ``chain`` are tried; the others are not asked."""
        num_stages, num_rows = self.confidences.shape
        ascending = np.sort(self.confidences, axis=1)
        for step in range(1, _STEPS + 1):
            place = num_rows - math.ceil(step * num_rows / _STEPS)
            yield tuple(float(ascending[stage, place]) if stage in chain else None for stage in range(num_stages - 1))

    def outcome(self, thresholds: Thresholds) -> _Outcome:
        stages = self._answering(thresholds)
        right, last = np.take_along_axis(self.right, stages[None], axis=0)[0], self.right[-1]
        shares = np.bincount(stages, minlength=len(self.costs)) / len(stages)
        reached = np.cumsum(shares[::-1])[::-1]  # those that a stage or a later one answers
        asked = np.array([each is not None for each in thresholds] + [True])
        return _Outcome(
            thresholds=thresholds,
            shares=tuple(shares.tolist()),
            compute=float(self.costs[asked] @ reached[asked] / self.costs[-1]),
            right=int(last.sum()),
            lost=int((last & ~right).sum()),
            gained=int((~last & right).sum()),
        )

    def _answering(self, thresholds: Thresholds) -> NDArray[np.intp]:
        """The stage that answers each row."""
        stages = np.full(self.confidences.shape[1], len(thresholds))
        for stage, threshold in reversed(list(enumerate(thresholds))):
            if threshold is not None:
                stages[self.confidences[stage] >= threshold] = stage
        return stages


def _chains(num_stages: int) -> list[tuple[int, ...]]:
    """Every choice of stages that are asked before the last."""
    earlier = range(num_stages - 1)
    return [chain for size in range(1, num_stages) for chain in itertools.combinations(earlier, size)]


def _require_enough(seen: _Seen, floor: float, quantile: float) -> None:
    """Refuse rows on which not even a cascade that loses none of them would show that the floor holds."""
    right, needed = int(seen.right[-1].sum()), _required_right(floor, quantile)
    if right < needed:
        raise DataError(
            f"a cascade is calibrated on {len(seen.right[-1]):,} validation rows, of which its last stage answers "
            f"{right:,} right: an accuracy_floor of {floor:g} takes {needed:,} at least; give more data, raise "
            "data.validation_fraction, or lower serve.cascade.accuracy_floor"
        )


def _required_right(floor: float, quantile: float) -> int:
    """The least r for which the test of the module is passed with b = c = 0."""
    deviation = quantile * math.sqrt(floor * (1 - floor))  # of one row, times the quantile
    root = (deviation + math.sqrt(deviation**2 + 4 * (1 - floor) * _CONTINUITY)) / (2 * (1 - floor))
    return math.ceil(root**2)
