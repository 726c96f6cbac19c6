"""The judge of models with an output for each token, which reads the metric's sums over each row."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from app.data.prepared import Dataset
from app.tasks.judgement.base import Interval, Judge, Predictions, resampled_interval
from app.telemetry.judgement import Baseline, Judgement


class RowSums(NamedTuple):
    """A baseline as sums of the metric."""

    name: str
    sums: Tensor
    """``Metric.sums`` of single rows of the split, of shape (rows, ``Metric.size``)."""


class SumsJudge(Judge):
    """Judges by sums of rows. Outputs are not kept, because outputs for each token take gigabytes."""

    compares_ratios = False
    """Whether scores are compared by their ratios, as unbounded scores are."""

    @abstractmethod
    def baselines(self, split: Dataset) -> Sequence[RowSums]:
        """Return the constant answer on some rows of a split, and a simpler model if there is one."""

    def judge(
        self,
        name: str,
        split: Dataset,
        value: float,
        made: Iterable[Predictions],
        trained: Iterable[Predictions] = (),
    ) -> Judgement:
        low, high = self._interval(value, self._sums_of(made), len(split))
        trivial, *simpler = (self._baseline(baseline, len(split)) for baseline in self.baselines(split))
        learned = self._sums_of(trained)
        return Judgement(
            metric=self.metric.name,
            mode=self.metric.mode,
            split=name,
            rows=len(split),
            value=value,
            low=low,
            high=high,
            trivial=trivial,
            linear=next(iter(simpler), None),
            trained=self.metric.value(learned.sum(0)) if len(learned) else None,
            compares_ratios=self.compares_ratios,
        )

    def _sums_of(self, made: Iterable[Predictions]) -> Tensor:
        """Return the sums of each row, of shape (rows, ``Metric.size``)."""
        rows = [
            self.metric.sums(outputs, targets).double()
            for part in made
            for outputs, targets in zip(torch.split(part.outputs, 1), torch.split(part.targets, 1), strict=True)
        ]
        return torch.stack(rows) if rows else torch.zeros(0, self.metric.size)

    def _interval(self, value: float, sums: Tensor, num_rows: int) -> Interval:
        def statistic_of(chosen: list[int]) -> Callable[[NDArray[Any]], float]:
            rows = sums[chosen]
            return lambda indices: self.metric.value(rows[indices].sum(0))

        return resampled_interval(value, num_rows, len(sums), statistic_of)

    def _baseline(self, given: RowSums, num_rows: int) -> Baseline:
        value = self.metric.value(given.sums.sum(0))
        if len(given.sums) == num_rows:
            return Baseline(name=given.name, value=value)
        return self._interval(value, given.sums, len(given.sums)).baseline(given.name, value, self.metric)
