"""The common part of all judges: a model's predictions, the interval of a score, and rows spread over a split."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from app.data.prepared import Dataset
from app.tasks.metrics import Metric
from app.telemetry.judgement import Baseline, Judgement

_MAX_SHARDS = 16
"""Maximum number of shards of a split that are opened. On object storage, each shard is a download."""
_MIN_RESAMPLED, _MAX_RESAMPLED, _RESAMPLES = 30, 1_000, 999
_NORMAL_95 = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Predictions:
    """A model's outputs for some rows of a split, with their targets."""

    outputs: Tensor
    """float32 of shape (rows, …)."""
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)


class Judge(ABC):
    """Judges the models of a recipe by the task's first metric."""

    metric: Metric

    @abstractmethod
    def judge(
        self,
        name: str,
        split: Dataset,
        value: float,
        made: Iterable[Predictions],
        trained: Iterable[Predictions] = (),
    ) -> Judgement:
        """Return the judgement of a model whose score on the whole split is ``value``.

        Args:
            name: the name of the split, such as validation.
            made: the model's predictions for some or all rows of the split, in batches. They are read once.
            trained: its predictions for some training rows, likewise.
        """


class Interval(NamedTuple):
    """The 95 % interval of a score. NaN if there are too few rows."""

    low: float
    high: float

    def baseline(self, name: str, value: float, metric: Metric) -> Baseline:
        """Return a baseline with the score ``value`` and this interval."""
        return Baseline(name=name, value=value, margin=self.high - value if metric.mode == "max" else value - self.low)


def share_interval(value: float, num_rows: int) -> Interval:
    """Return Wilson's interval for a share of rows."""
    share, spare = round(value * num_rows) / num_rows, _NORMAL_95**2 / num_rows
    center, width = share + spare / 2, math.sqrt(spare * (share * (1 - share) + spare / 4))
    return Interval(max(0.0, (center - width) / (1 + spare)), min(1.0, (center + width) / (1 + spare)))


def resampled_interval(
    value: float, num_rows: int, sampled: int, statistic_of: Callable[[list[int]], Callable[[NDArray[Any]], float]]
) -> Interval:
    """Return a bootstrap interval over rows.

    Args:
        value: the score of all ``num_rows`` rows.
        sampled: the number of rows that can be scored again.
        statistic_of: takes the numbers of some of these rows. It returns a function from indices of these to the score.
    """
    chosen = spread(sampled, _MAX_RESAMPLED)
    if (few := len(chosen)) < _MIN_RESAMPLED:
        return Interval(math.nan, math.nan)
    statistic, random = statistic_of(chosen), np.random.default_rng(0)
    resampled = np.array([statistic(random.integers(few, size=few)) for _ in range(_RESAMPLES)])
    # Without rows of a class, some metrics have no value.
    known = resampled[np.isfinite(resampled)]
    if len(known) < _RESAMPLES / 2:
        return Interval(math.nan, math.nan)
    center = statistic(np.arange(few))
    # If all rows score the same, up to three of as many others may differ, by the rule of three.
    width = 0.0 if known.min() < known.max() else abs(center) * 3.0 / few
    # The interval comes from fewer rows than the score.
    scale, (low, high) = math.sqrt(few / num_rows), np.quantile(known, [0.025, 0.975]).tolist()
    return Interval(value - scale * (center - low + width), value + scale * (high - center + width))


def spread(num_rows: int, count: int) -> list[int]:
    """Return the numbers of at most ``count`` evenly spread rows, because rows may be sorted by label or by time."""
    chosen: list[int] = np.unique(np.linspace(0, num_rows - 1, min(count, num_rows), dtype=int)).tolist()
    return chosen


def places_of(dataset: Dataset, count: int) -> list[int]:
    """Return the numbers of at most ``count`` rows, spread over ``_MAX_SHARDS`` shards."""
    if (shards := dataset.shards) is None:
        return spread(len(dataset), count)
    bounds = shards.first_rows
    opened = spread(len(bounds) - 1, _MAX_SHARDS)
    rows = np.concatenate([np.arange(bounds[number], bounds[number + 1]) for number in opened])
    places: list[int] = rows[spread(len(rows), count)].tolist()
    return places
