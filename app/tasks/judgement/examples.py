"""The judge of labelled examples: by constant answers, a linear model, and signs of faulty data."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.best_effort import attempt
from app.config import Recipe
from app.config.metrics import cost_of
from app.data.labelled import CollatingTargets, LabelledDataset
from app.data.prepared import Dataset
from app.data.targets import HasConstants
from app.tasks.base import ServedTask
from app.tasks.judgement.base import Interval, Judge, Predictions, resampled_interval, share_interval
from app.tasks.judgement.faults import KEYS, MAX_COLUMNS, noise, repeated, table_of
from app.tasks.judgement.linear import VECTORS, fitted, linear_model, tree
from app.tasks.judgement.rows import Rows, rows_of, values_of
from app.tasks.metrics import Metric
from app.tasks.objective import select_counted
from app.telemetry.judgement import Baseline, Judgement

_MAX_TARGETS = 10**6
"""Maximum targets of a linear model. With many labels, it learns from fewer rows."""
_MAX_COLUMN_ROWS = 5_000
_LEAK, _MIN_LEAK = 0.98, 40
"""Share of the gain from a constant to a perfect score, above which a single column is a leak. Minimum number of rows
without the most frequent label: with fewer, a column may be right by chance."""
_MAX_OUTPUTS = 2**26
"""Maximum number of a model's output values in memory."""


@dataclass(frozen=True)
class ExampleJudge(Judge):
    """Judges models of labelled examples. ``train`` has the rows that they learned from."""

    task: ServedTask
    metric: Metric
    train: LabelledDataset
    fits_linear: bool

    @classmethod
    def of(cls, recipe: Recipe, task: ServedTask, train: Dataset) -> "ExampleJudge | None":
        """Return the judge of a recipe; None for other kinds of data, and for a task without a metric."""
        if not isinstance(train, LabelledDataset) or isinstance(train.targets, CollatingTargets):
            return None
        if (metric := task.gate_of(train.targets)) is None:
            return None
        # The rows of a stream are no longer available.
        is_possible = "linear baseline" in task.supports and recipe.data.stream is None
        wanted = recipe.train.linear_baseline
        return cls(task, metric, train, is_possible if wanted is None else wanted)

    def judge(
        self,
        name: str,
        split: Dataset,
        value: float,
        made: Iterable[Predictions],
        trained: Iterable[Predictions] = (),
    ) -> Judgement:
        assert isinstance(split, LabelledDataset)
        predicted, of_training = _joined(made), _joined(trained)
        low, high = self._interval(value, predicted, len(split)) if predicted else Interval(math.nan, math.nan)
        learned, rows = self._read(self.train), self._read(split)
        trivial = self._trivial(split)
        return Judgement(
            metric=self.metric.name,
            mode=self.metric.mode,
            split=name,
            rows=len(split),
            value=value,
            low=low,
            high=high,
            trivial=trivial,
            linear=self._linear(learned, rows) if self.fits_linear else None,
            trained=self.metric.of(of_training.outputs, of_training.targets) if of_training else None,
            leaks=[*self._leaking_columns(learned, rows, trivial), *repeated(name, learned, rows)],
            noise=noise(predicted) if predicted and self.task.learns_classes else 0.0,
        )

    def _read(self, split: LabelledDataset) -> Rows:
        """Return the rows whose inputs are read: none if nothing reads them."""
        is_read = self.fits_linear or self.task.processor.modality in KEYS
        return rows_of(split) if is_read else Rows([], [], split)

    def _interval(self, value: float, made: Predictions, num_rows: int) -> Interval:
        """Return the interval of a score of ``num_rows`` rows: Wilson's for a share, else a bootstrap's."""
        if self.metric.hits(made.outputs, made.targets) is not None:
            return share_interval(value, num_rows)
        return resampled_interval(
            value,
            num_rows,
            len(made),
            lambda chosen: self.metric.of_subsets(made.outputs[chosen], made.targets[chosen]),
        )

    def _trivial(self, split: LabelledDataset) -> Baseline | None:
        """Return the score of the best constant answer on training rows."""
        if not isinstance(split.targets, HasConstants):
            return None
        (learned, _), (values, num_rows) = values_of(self.train), values_of(split)
        constants = {name: torch.from_numpy(row) for name, row in split.targets.constants(learned).items()}

        def cost(name: str) -> float:
            return cost_of(self._score(constants[name].expand(len(learned), -1), learned), self.metric.mode)

        best = min(constants, key=cost)
        return self._baseline(best, constants[best].expand(len(values), -1), values, num_rows)

    def _linear(self, learned: Rows, rows: Rows) -> Baseline | None:
        """Return the score of a linear model of character n-grams, of small pixels, or of a table's columns."""

        def fit() -> Baseline:
            few = learned.spread(max(1, _MAX_TARGETS // learned.targets.num_outputs))
            modality = self.task.processor.modality
            vectors, others = VECTORS[modality](few, rows)
            outputs = fitted(partial(linear_model, modality), vectors, few, others)
            return self._baseline("the linear baseline", outputs, rows.values, len(rows.dataset))

        return attempt(fit, "the linear baseline cannot be fitted", "the job")

    def _baseline(self, name: str, outputs: Tensor, values: Sequence[Any], num_rows: int) -> Baseline:
        """Return the baseline of outputs for the rows with ``values``, which are a sample of ``num_rows``."""
        value = self._score(outputs, values)
        if len(values) == num_rows:
            return Baseline(name=name, value=value)
        made = Predictions(outputs, torch.from_numpy(self.train.targets.batch(values)))
        return self._interval(value, made, len(values)).baseline(name, value, self.metric)

    def _leaking_columns(self, learned: Rows, rows: Rows, trivial: Baseline | None) -> list[str]:
        """Return a clause for each column of a table that determines the label alone."""
        if self.task.processor.modality != "row" or trivial is None:
            return []
        perfect = 1.0 if self.metric.mode == "max" else 0.0
        few, others = learned.spread(_MAX_COLUMN_ROWS), rows.spread(_MAX_COLUMN_ROWS)
        _, counts = np.unique(others.targets.batch(others.values), axis=0, return_counts=True)
        if len(others.values) - counts.max() < _MIN_LEAK:
            return []
        clauses = []
        table = table_of(few, others)
        for name in list(table)[:MAX_COLUMNS]:
            cells = table[[name]].to_numpy()
            outputs = fitted(tree, cells[: len(few.values)], few, cells[len(few.values) :])
            gained = self._score(outputs, others.values) - trivial.value
            if perfect != trivial.value and gained / (perfect - trivial.value) >= _LEAK:
                clauses.append(f"column {name!r} alone determines the label")
        return clauses

    def _score(self, outputs: Tensor, values: Sequence[Any]) -> float:
        return self.metric.of(outputs, torch.from_numpy(self.train.targets.batch(values)))


def _joined(made: Iterable[Predictions]) -> Predictions | None:
    """Return the valid rows of all batches, up to ``_MAX_OUTPUTS`` output values; None if there are no rows."""
    parts, kept = [], 0
    for part in made:
        parts.append(select_counted(part.outputs, part.targets))
        kept += part.outputs.numel()
        if kept > _MAX_OUTPUTS:
            break
    if not parts:
        return None
    outputs, targets = zip(*parts, strict=True)
    return Predictions(torch.cat(outputs), torch.cat(targets))
