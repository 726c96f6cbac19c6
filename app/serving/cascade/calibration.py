"""Finding the thresholds of a cascade, on rows whose labels are known.

**What is shown of every threshold that is taken.** Of n rows the last stage answers r right; of these the cascade
loses b, and it gains c others. That in the long run P(cascade right) >= f P(last stage right), f the floor, is shown if

    z = (r - b + c - f r) / sqrt(v)  >=  the normal quantile of 1 - risk
    v = (h + sqrt(h^2 - 4 (1 - f^2) b (r + c))) / 2 - (1 - f) (r + c),    h = (1 - f^2) r + b + c

v is the variance of the numerator where the two sides are just equal, with the likeliest probabilities of b and c
there: the score test of a ratio of proportions in matched pairs (Tang, Tang and Chan 2003, doi:10.1002/sim.1213). It
counts gains against losses, as accuracy does; the exact bound of b alone would send far more rows on. It approximates:
where nothing is gained, a risk of 0.05 is 0.062 at worst; and since it is worst where nothing is lost either, r has to
be so large that f^r <= risk.

**In which order.** Thresholds are tried from the strictest on, and the first that fails ends it: so many may be tried,
and still the one that is taken misses the floor with probability ``risk`` at most. This is fixed-sequence testing in
"Learn then Test" (Angelopoulos et al. 2021, arXiv:2110.01052). At step k of 20 each stage keeps what it would keep if
it answered k/20 of all rows. Where there are more than two stages, every choice of those that run is a sequence of its
own, and the sequences share the risk.

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

RISK = 0.05
_STEPS = 20

Thresholds = tuple[float | None, ...]


def calibrate(
    stage_logits: Sequence[NDArray[Any]], labels: NDArray[np.integer[Any]], costs: Sequence[float], floor: float
) -> CascadeRule:
    """The rule of least compute among those that are shown to hold the floor.

    If none of them saves anything, every row goes to the last stage.

    Args:
        stage_logits: of each stage, the last one being the one to compare with; each of shape (rows, labels), finite.
        labels: the right class of each row, of shape (rows).
        costs: of one row in each stage, in seconds or operations, above 0.
        floor: least accuracy of the cascade, as a share of the last stage's; above 0 and below 1.

    Raises:
        DataError: there are too few rows to show anything, or logits that are no numbers.
        ValueError: the arguments do not fit each other.
    """
    _check(stage_logits, labels, costs, floor)
    seen = _Seen.of(stage_logits, labels, costs)
    chains = _chains(len(costs))
    risk = RISK / len(chains)
    _require_enough(seen, floor, risk)
    best = seen.outcome((None,) * (len(costs) - 1))
    for chain in chains:
        for thresholds in seen.thresholds_of(chain):
            outcome = seen.outcome(thresholds)
            if not outcome.shows(floor, risk):
                break
            best = min(best, outcome, key=lambda each: each.compute)
    return CascadeRule(
        thresholds=best.thresholds,
        floor=floor,
        risk=RISK,
        samples=len(labels),
        expected_accuracy=best.relative_accuracy,
        expected_shares=best.shares,
        expected_compute=best.compute,
    )


def required_right_answers(floor: float, risk: float = RISK) -> int:
    """Rows that the last stage has to answer right: fewer show nothing, even if not one of them is lost."""
    return math.ceil(math.log(risk) / math.log(floor))


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

    def shows(self, floor: float, risk: float) -> bool:
        """Whether the floor is shown to hold; the module says how."""
        r, b, c = self.right, self.lost, self.gained
        h = (1 - floor**2) * r + b + c
        root = math.sqrt(max(0.0, h**2 - 4 * (1 - floor**2) * b * (r + c)))  # below 0 by rounding alone
        v = (h + root) / 2 - (1 - floor) * (r + c)
        return r - b + c - floor * r >= NormalDist().inv_cdf(1 - risk) * math.sqrt(v)


@dataclass(frozen=True)
class _Seen:
    """What the stages make of the rows."""

    confidences: NDArray[np.float64]
    """Of shape (stages, rows)."""

    correct: NDArray[np.bool_]
    """Of shape (stages, rows)."""

    costs: NDArray[np.float64]

    @classmethod
    def of(
        cls, stage_logits: Sequence[NDArray[Any]], labels: NDArray[np.integer[Any]], costs: Sequence[float]
    ) -> "_Seen":
        return cls(
            np.stack([max_probability(logits) for logits in stage_logits]),
            np.stack([logits.argmax(-1) == labels for logits in stage_logits]),
            np.array(costs, np.float64),
        )

    def thresholds_of(self, chain: Sequence[int]) -> Iterator[Thresholds]:
        """The sequence in which thresholds of the stages of ``chain`` are tried; the others are not run."""
        num_stages, num_rows = self.confidences.shape
        ascending = np.sort(self.confidences, axis=1)
        for step in range(1, _STEPS + 1):
            place = num_rows - math.ceil(step * num_rows / _STEPS)
            yield tuple(float(ascending[stage, place]) if stage in chain else None for stage in range(num_stages - 1))

    def outcome(self, thresholds: Thresholds) -> _Outcome:
        stages = self._answering(thresholds)
        right = np.take_along_axis(self.correct, stages[None], axis=0)[0]
        last = self.correct[-1]
        shares = np.bincount(stages, minlength=len(self.costs)) / len(stages)
        reached = np.cumsum(shares[::-1])[::-1]  # those that a stage or a later one answers
        runs = np.array([each is not None for each in thresholds] + [True])
        return _Outcome(
            thresholds=thresholds,
            shares=tuple(shares.tolist()),
            compute=float(self.costs[runs] @ reached[runs] / self.costs[-1]),
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
    """Every choice of stages that run before the last."""
    earlier = range(num_stages - 1)
    return [chain for size in range(1, num_stages) for chain in itertools.combinations(earlier, size)]


def _check(
    stage_logits: Sequence[NDArray[Any]], labels: NDArray[np.integer[Any]], costs: Sequence[float], floor: float
) -> None:
    shapes = [logits.shape for logits in stage_logits]
    if len(shapes) < 2 or len(set(shapes)) > 1 or len(shapes[0]) != 2 or labels.shape != shapes[0][:1]:
        raise ValueError(f"logits of shapes {shapes}, labels of {labels.shape}: expected (rows, labels) twice or more")
    if len(costs) != len(shapes) or not all(0 < cost < math.inf for cost in costs):
        raise ValueError(f"costs {list(costs)}: expected a number above 0 for each of {len(shapes)} stages")
    if not 0 < floor < 1:
        raise ValueError(f"floor {floor}: expected a share above 0 and below 1")
    for stage, logits in enumerate(stage_logits):
        if odd := int((~np.isfinite(logits)).any(-1).sum()):
            raise DataError(
                f"stage {stage} of the cascade answers {odd} of {len(logits):,} validation rows with logits that are "
                "no numbers: compile it in another precision"
            )


def _require_enough(seen: _Seen, floor: float, risk: float) -> None:
    right, needed = int(seen.correct[-1].sum()), required_right_answers(floor, risk)
    if right < needed:
        raise DataError(
            f"a cascade is calibrated on {len(seen.correct[-1]):,} validation rows, of which its last stage answers "
            f"{right:,} right: a floor of {floor:g} takes {needed:,} right answers at least, else not even a cascade "
            "that loses none of them shows that it holds; raise data.validation_fraction, or lower accuracy_floor"
        )
