"""The judgement of a model's score: its interval, baselines, and signs of faulty data."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.best_effort import attempt
from app.config import Recipe
from app.config.metrics import cost_of
from app.data.labelled import LabelledDataset
from app.data.targets import HasConstants, Targets, softmax
from app.tasks.base import ServedTask
from app.tasks.metrics import Metric
from app.telemetry.judgement import Baseline, Judgement

if TYPE_CHECKING:  # it takes long to import
    import pandas as pd

_MAX_ROWS = {"text": 20_000, "row": 20_000}
"""Rows that a baseline is fitted to and measured on, by modality. Files take more memory."""
_MAX_FILES = 2_000
_MAX_CHARACTERS, _SAMPLED = 8_000_000, 1_000
"""Maximum characters that are read, and the number of texts whose lengths estimate the total."""
_MAX_WEIGHTS, _MAX_TARGETS = 2**22, 10**6
"""Maximum weights and targets of a linear model. With many labels it has fewer features and rows."""
_MAX_COLUMN_ROWS, _MAX_COLUMNS = 5_000, 200
_MAX_RESAMPLED, _RESAMPLES = 1_000, 999
_LEAK = 0.98
"""Share of the gain from a constant to a perfect score, above which a single column is a leak."""
_MAX_REPEATED, _MIN_DISTINCT = 0.1, 0.2
"""Maximum share of rows that nearly equal training rows; minimum share of distinct keys, below which that is chance."""
_MIN_NOISY, _MIN_NOISY_ROWS, _MIN_EXPLAINED = 0.05, 10, 0.6
"""Minimum share and number of rows with doubted labels, and share of the errors, to count as noise."""
_MAX_OVERCONFIDENCE = 0.1


Keys = NDArray[Any]
"""The values by which rows are compared, of shape (rows,)."""


@dataclass(frozen=True)
class Predictions:
    """A model's outputs for some rows of a split, with their targets."""

    outputs: Tensor
    """float32 of shape (rows, …)."""
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True)
class Judge:
    """Judges models of a recipe by the task's first metric. ``train`` are the rows that they learned from."""

    recipe: Recipe
    task: ServedTask
    metric: Metric
    train: LabelledDataset
    fits_linear: bool

    @classmethod
    def of(cls, recipe: Recipe, task: ServedTask, train: LabelledDataset) -> "Judge | None":
        """Return the judge of a recipe; None for a task without a metric."""
        if (metric := task.gate_of(train.targets)) is None:
            return None
        # The rows of a stream are no longer available.
        is_possible = "linear baseline" in task.supports and recipe.data.stream is None
        wanted = recipe.train.linear_baseline
        return cls(recipe, task, metric, train, is_possible if wanted is None else wanted)

    def judge(
        self, name: str, split: LabelledDataset, value: float, made: Predictions, trained: Predictions | None = None
    ) -> Judgement:
        """Return the judgement of a model whose score on the whole split is ``value``.

        Args:
            name: of the split, such as validation.
            made: the model's predictions for some or all rows of the split.
            trained: its predictions for some training rows.
        """
        low, high = self._interval(value, made, len(split))
        learned, rows = _rows_of(self.train), _rows_of(split)
        trivial = self._trivial(learned, rows)
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
            trained=self.metric.of(trained.outputs, trained.targets) if trained else None,
            leaks=[*self._leaking_columns(learned, rows, trivial), *self._repeated(name, learned, rows)],
            noise=_noise(made) if self.task.learns_classes else 0.0,
        )

    def _interval(self, value: float, made: Predictions, num_rows: int) -> tuple[float, float]:
        """Return the 95 % interval: Wilson's for a share, else that of a bootstrap over the rows."""
        from scipy import stats

        if self.metric.hits(made.outputs, made.targets) is not None:
            share = stats.binomtest(round(value * num_rows), num_rows).proportion_ci(method="wilson")
            return float(share.low), float(share.high)
        chosen = spread(len(made), _MAX_RESAMPLED)
        few = len(chosen)
        statistic = self.metric.of_subsets(made.outputs[chosen], made.targets[chosen])
        found = stats.bootstrap(
            (np.arange(few),), statistic, vectorized=False, n_resamples=_RESAMPLES, method="percentile", rng=0
        ).confidence_interval
        center = statistic(np.arange(few))
        # The interval is of fewer rows than the score.
        scale = math.sqrt(few / num_rows)
        return value - scale * (center - float(found.low)), value + scale * (float(found.high) - center)

    def _trivial(self, learned: "_Rows", rows: "_Rows") -> Baseline | None:
        """Return the score of the constant answer that is best on training rows."""
        if not isinstance(rows.targets, HasConstants):
            return None
        constants = rows.targets.constants(learned.values)

        def score(name: str, some: "_Rows") -> float:
            return self._score(np.tile(constants[name], (len(some.values), 1)), some)

        best = min(constants, key=lambda name: cost_of(score(name, learned), self.metric.mode))
        return Baseline(name=best, value=score(best, rows))

    def _linear(self, learned: "_Rows", rows: "_Rows") -> Baseline | None:
        """Return the score of a linear model of character n-grams, or of a table's columns."""

        def fit() -> float:
            few = learned.spread(max(1, _MAX_TARGETS // learned.targets.num_outputs))
            vectors, others = _VECTORS[self.task.processor.modality](few, rows)
            return self._score(_fitted(_linear_model, vectors, few, others), rows)

        value = attempt(fit, "the linear baseline cannot be fitted", "the job")
        return None if value is None else Baseline(name="the linear baseline", value=value)

    def _leaking_columns(self, learned: "_Rows", rows: "_Rows", trivial: Baseline | None) -> list[str]:
        """Return a clause for each column of a table that determines the label alone."""
        if self.task.processor.modality != "row" or trivial is None:
            return []
        perfect = 1.0 if self.metric.mode == "max" else 0.0
        few, others = learned.spread(_MAX_COLUMN_ROWS), rows.spread(_MAX_COLUMN_ROWS)
        clauses = []
        table = _table(few, others)
        for name in list(table)[:_MAX_COLUMNS]:
            cells = table[[name]].to_numpy()
            outputs = _fitted(_tree, cells[: len(few.values)], few, cells[len(few.values) :])
            gained = self._score(outputs, others) - trivial.value
            if perfect != trivial.value and gained / (perfect - trivial.value) >= _LEAK:
                clauses.append(f"column {name!r} alone determines the label")
        return clauses

    def _repeated(self, name: str, learned: "_Rows", rows: "_Rows") -> list[str]:
        """Return a clause with the share of rows that nearly equal training rows. Preparation finds equal ones."""
        keys = _KEYS.get(self.task.processor.modality)
        # If not all training rows were read, some of the repeated ones were missed.
        read = len(learned.values) / len(self.train)
        shares = (_share_repeated(*pair) / read for pair in keys(learned, rows)) if keys else ()
        share = min(1.0, max(shares, default=0.0))
        return [f"{share:.0%} of the {name} rows nearly equal training rows"] if share > _MAX_REPEATED else []

    def _score(self, outputs: NDArray[Any], rows: "_Rows") -> float:
        targets = torch.from_numpy(rows.targets.batch(rows.values))
        return self.metric.of(torch.from_numpy(outputs.astype(np.float32)), targets)


@dataclass(frozen=True)
class _Rows:
    """Some rows of a split, evenly spaced."""

    inputs: Sequence[Any]
    values: Sequence[Any]
    dataset: LabelledDataset

    @property
    def targets(self) -> Targets:
        return self.dataset.targets

    def spread(self, count: int) -> "_Rows":
        """Return at most ``count`` of the rows."""
        places = spread(len(self.values), count)
        return _Rows([self.inputs[place] for place in places], [self.values[place] for place in places], self.dataset)


def spread(num_rows: int, count: int) -> list[int]:
    """Return the numbers of at most ``count`` rows, spread over all: rows may be sorted by label or by time."""
    chosen: list[int] = np.unique(np.linspace(0, num_rows - 1, min(count, num_rows), dtype=int)).tolist()
    return chosen


def _rows_of(dataset: LabelledDataset) -> _Rows:
    count = _MAX_ROWS.get(dataset.processor.modality, _MAX_FILES)
    lengths, sample = dataset.lengths, spread(len(dataset), _SAMPLED)
    if characters := sum(int(lengths[place]) for place in sample):
        count = max(1, min(count, _MAX_CHARACTERS * len(sample) // characters))
    places = spread(len(dataset), count)
    return _Rows(*dataset.split.take(places), dataset)


def _text_vectors(learned: _Rows, rows: _Rows) -> tuple[Any, Any]:
    from sklearn.feature_extraction.text import TfidfVectorizer

    # Characters need no tokenizer, and suit every language.
    features = max(1, _MAX_WEIGHTS // learned.targets.num_outputs)
    vectors = TfidfVectorizer(analyzer="char", ngram_range=(1, 2), sublinear_tf=True, max_features=features)
    return vectors.fit_transform(learned.inputs), vectors.transform(rows.inputs)


def _row_vectors(learned: _Rows, rows: _Rows) -> tuple[Any, Any]:
    """Return the processor's numbers, and a column of 0 and 1 for each of its categories."""
    from scipy.sparse import csr_array, hstack
    from sklearn.preprocessing import OneHotEncoder

    parts: list[tuple[Any, Any]] = []
    encoded, others = (some.dataset.processor.encode(some.inputs) for some in (learned, rows))
    for name, tensor in encoded.items():
        if np.issubdtype(tensor.dtype, np.floating):
            parts.append((csr_array(tensor), csr_array(others[name])))
        else:
            encoder = OneHotEncoder(handle_unknown="ignore").fit(tensor)
            parts.append((encoder.transform(tensor), encoder.transform(others[name])))
    first, second = zip(*parts, strict=True)
    return hstack(first).tocsr(), hstack(second).tocsr()


_VECTORS: Mapping[str, Callable[[_Rows, _Rows], tuple[Any, Any]]] = {"text": _text_vectors, "row": _row_vectors}


def _linear_model(kind: str) -> Any:
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.multiclass import OneVsRestClassifier

    logistic = LogisticRegression(C=4.0, max_iter=500)
    return {"class": logistic, "classes": OneVsRestClassifier(logistic), "number": Ridge()}[kind]


def _tree(kind: str) -> Any:
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    return DecisionTreeRegressor(random_state=0) if kind == "number" else DecisionTreeClassifier(random_state=0)


def _fitted(make: Callable[[str], Any], vectors: Any, learned: _Rows, others: Any) -> NDArray[Any]:
    """Fit a model of scikit-learn to training rows. Return its outputs for others, in the task's layout."""
    kind, given = learned.targets.rule.kept_as, learned.targets.batch(learned.values)
    model = make(kind).fit(vectors, given)
    if kind == "number":
        return np.asarray(model.predict(others)).reshape(-1, 1)
    if kind == "classes":
        return 2.0 * np.asarray(model.predict(others)).reshape(-1, learned.targets.num_outputs) - 1.0
    outputs = np.full((others.shape[0], learned.targets.num_outputs), np.log(1e-9))
    outputs[:, model.classes_] = np.log(np.clip(model.predict_proba(others), 1e-9, 1.0))
    return outputs


def _table(learned: _Rows, rows: _Rows) -> "pd.DataFrame":
    """Return both as one table of numbers, with 0 for a missing number and a code for each category."""
    import pandas as pd

    table = pd.DataFrame([dict(row) for row in (*learned.inputs, *rows.inputs)])

    def numbered(cells: "pd.Series[Any]") -> "pd.Series[Any]":
        if pd.api.types.is_numeric_dtype(cells):
            return cells.fillna(0.0)
        return pd.Series(pd.factorize(cells.astype(str))[0], cells.index)

    return table.apply(numbered)


def _text_keys(learned: _Rows, rows: _Rows) -> Iterator[Sequence[Keys]]:
    """Yield the texts without spaces, punctuation and case."""
    first, second = (np.array([_letters(text) for text in some.inputs], object) for some in (learned, rows))
    yield [first, second]


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


def _row_keys(learned: _Rows, rows: _Rows) -> Iterator[Sequence[Keys]]:
    """Yield a hash of each row without one of its columns, such as an id."""
    import pandas as pd

    table = pd.DataFrame([dict(row) for row in (*learned.inputs, *rows.inputs)]).astype(str)
    cells = [pd.util.hash_array(np.char.add(f"{name}=", table[name].to_numpy(str)).astype(object)) for name in table]
    whole = np.sum(cells, axis=0, dtype=np.uint64)
    for own in cells[:_MAX_COLUMNS]:
        yield np.split(whole - own, [len(learned.values)])


_KEYS: Mapping[str, Callable[[_Rows, _Rows], Iterator[Sequence[Keys]]]] = {"text": _text_keys, "row": _row_keys}


def _share_repeated(learned: Keys, rows: Keys) -> float:
    """Return the share of rows whose key a training row has; 0 if few keys differ, so that rows agree by chance."""
    is_telling = len(np.unique(learned)) >= _MIN_DISTINCT * len(learned)
    return float(np.isin(rows, learned).mean()) if is_telling else 0.0


def _noise(made: Predictions) -> float:
    """Return the share of the rows whose label is likely wrong; 0 if that does not explain most errors.

    The probabilities of an overconfident model do not show it.
    """
    from app.data.label_noise import doubted, mean_probabilities

    probabilities, classes = softmax(made.outputs.numpy()), made.targets.numpy()
    chosen = probabilities.argmax(-1)
    errors = chosen != classes
    if probabilities.max(-1).mean() - (1.0 - errors.mean()) > _MAX_OVERCONFIDENCE:
        return 0.0
    own = probabilities[np.arange(len(classes)), classes]
    suspects = doubted(probabilities, classes, mean_probabilities(own, classes, probabilities.shape[1])) >= 0
    share = float(suspects.mean())
    is_noise = share >= _MIN_NOISY and suspects.sum() >= max(_MIN_NOISY_ROWS, _MIN_EXPLAINED * errors.sum())
    return share if is_noise else 0.0
