"""The judge of language models. The baseline is the unigram model of the training tokens, on the same tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from app.config import Recipe
from app.data.prepared import IGNORED, Dataset
from app.tasks.base import Task
from app.tasks.judgement.base import places_of
from app.tasks.judgement.sums import RowSums, SumsJudge
from app.tasks.metrics import Metric

_MAX_TOKENS = 2**24
"""Maximum number of tokens of a split that are read."""
_ROWS = 64


@dataclass(frozen=True)
class TokenJudge(SumsJudge):
    """Judges the perplexity of language models."""

    compares_ratios = True

    metric: Metric
    train: Dataset
    vocab_size: int

    @classmethod
    def of(cls, recipe: Recipe, task: Task, train: Dataset, vocab_size: int) -> "TokenJudge | None":
        """Return the judge of a recipe; None for a stream, whose tokens are no longer available.

        Also None if the task's first metric is not the metric of the loss, by which the unigram model is measured.
        """
        metric = task.metrics[0]
        if recipe.data.stream or not metric.of_loss:
            return None
        return cls(metric, train, vocab_size)

    def baselines(self, split: Dataset) -> Sequence[RowSums]:
        costs = self._unigram_costs
        rows = [
            (costs[row[row != IGNORED]].sum(), (row != IGNORED).sum()) for part in _targets_of(split) for row in part
        ]
        return [RowSums("the unigram model", torch.tensor(rows, dtype=torch.float64))]

    @property
    def _unigram_costs(self) -> NDArray[np.float64]:
        """The negative logarithm of each token's share of the training targets, with add-one smoothing."""
        counts = np.ones(self.vocab_size)
        for part in _targets_of(self.train):
            counts += np.bincount(part[part != IGNORED], minlength=self.vocab_size)
        costs: NDArray[np.float64] = np.log(counts.sum()) - np.log(counts)
        return costs


def _targets_of(split: Dataset) -> Iterator[NDArray[Any]]:
    """Yield the targets of some rows, each of shape (rows, length)."""
    length = split.batch([0]).targets.shape[-1]
    places = places_of(split, max(1, _MAX_TOKENS // length))
    return (split.batch(places[first : first + _ROWS]).targets for first in range(0, len(places), _ROWS))
