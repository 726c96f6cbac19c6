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
"""Rows whose inputs are read, by modality. Nothing reads other inputs."""
_MAX_SHARDS = 16
"""Shards of a split that are opened. On object storage, each is a download."""
_MAX_CONSTANT_ROWS, _MAX_OUTPUTS = 200_000, 2**22
"""Rows that constant answers are measured on, and the outputs of these rows."""
_MAX_CHARACTERS, _SAMPLED = 8_000_000, 1_000
"""Maximum characters that are read, and the number of texts whose lengths estimate the total."""
_MAX_WEIGHTS, _MAX_TARGETS = 2**22, 10**6
"""Maximum weights and targets of a linear model. With many labels it has fewer features and rows."""
_MAX_COLUMN_ROWS, _MAX_COLUMNS = 5_000, 200
_MIN_RESAMPLED, _MAX_RESAMPLED, _RESAMPLES = 30, 1_000, 999
_LEAK, _MIN_LEAK = 0.98, 40
"""Share of the gain from a constant to a perfect score, above which a single column is a leak. And minimum rows without
the most frequent label: on fewer, a column is right by chance."""
_MAX_REPEATED, _MIN_DISTINCT = 0.1, 0.2
"""Maximum share of rows that nearly equal training rows; minimum share of distinct keys, below which that is chance."""
_TELLING, _MIN_TELLING = 0.9, 3
"""Share of the different rows of a table that one column tells apart, and number of such columns where equal rows are
no chance. Two columns may mean the same, such as a name and its number."""
_MIN_NOISY, _MIN_NOISY_ROWS, _MIN_EXPLAINED = 0.05, 10, 0.6
"""Minimum share and number of rows with doubted labels, and share of the errors, to count as noise."""
_MAX_OVERCONFIDENCE = 0.1
_MIN_VARIED, _DIGITS = 0.5, 4
"""Share of the rows whose probabilities differ, in so many digits, if a model knows more than the shares of groups."""


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
            trained=self.metric.of(trained.outputs, trained.targets) if trained else None,
            leaks=[*self._leaking_columns(learned, rows, trivial), *self._repeated(name, learned, rows)],
            noise=_noise(made) if self.task.learns_classes else 0.0,
        )

    def _interval(self, value: float, made: Predictions, num_rows: int) -> tuple[float, float]:
        """Return the 95 % interval: Wilson's for a share, else a bootstrap's over the rows. NaN: there are too few."""
        from scipy import stats

        if self.metric.hits(made.outputs, made.targets) is not None:
            share = stats.binomtest(round(value * num_rows), num_rows).proportion_ci(method="wilson")
            return float(share.low), float(share.high)
        chosen = spread(len(made), _MAX_RESAMPLED)
        if (few := len(chosen)) < _MIN_RESAMPLED:
            return math.nan, math.nan
        statistic, random = self.metric.of_subsets(made.outputs[chosen], made.targets[chosen]), np.random.default_rng(0)
        resampled = np.array([statistic(random.integers(few, size=few)) for _ in range(_RESAMPLES)])
        # Without rows of a class, some metrics have no value.
        known = resampled[np.isfinite(resampled)]
        if len(known) < _RESAMPLES / 2:
            return math.nan, math.nan
        center = statistic(np.arange(few))
        # If none of the rows differs, three others may, by the rule of three.
        width = 0.0 if known.min() < known.max() else abs(center) * 3.0 / few
        # The interval is of fewer rows than the score.
        scale, (low, high) = math.sqrt(few / num_rows), np.quantile(known, [0.025, 0.975]).tolist()
        return value - scale * (center - low + width), value + scale * (high - center + width)

    def _trivial(self, split: LabelledDataset) -> Baseline | None:
        """Return the score of the constant answer that is best on training rows."""
        if not isinstance(split.targets, HasConstants):
            return None
        (learned, _), (values, num_rows) = _values_of(self.train), _values_of(split)
        constants = {name: torch.from_numpy(row) for name, row in split.targets.constants(learned).items()}

        def cost(name: str) -> float:
            return cost_of(self._score(constants[name].expand(len(learned), -1), learned), self.metric.mode)

        best = min(constants, key=cost)
        return self._baseline(best, constants[best].expand(len(values), -1), values, num_rows)

    def _linear(self, learned: "_Rows", rows: "_Rows") -> Baseline | None:
        """Return the score of a linear model of character n-grams, or of a table's columns."""

        def fit() -> Baseline:
            few = learned.spread(max(1, _MAX_TARGETS // learned.targets.num_outputs))
            vectors, others = _VECTORS[self.task.processor.modality](few, rows)
            outputs = _fitted(_linear_model, vectors, few, others)
            return self._baseline("the linear baseline", outputs, rows.values, len(rows.dataset))

        return attempt(fit, "the linear baseline cannot be fitted", "the job")

    def _baseline(self, name: str, outputs: Tensor, values: Sequence[Any], num_rows: int) -> Baseline:
        """Return the score of outputs for the rows with ``values``, which are some of ``num_rows``."""
        value = self._score(outputs, values)
        if len(values) == num_rows:
            return Baseline(name=name, value=value)
        made = Predictions(outputs, torch.from_numpy(self.train.targets.batch(values)))
        low, high = self._interval(value, made, len(values))
        return Baseline(name=name, value=value, margin=high - value if self.metric.mode == "max" else value - low)

    def _leaking_columns(self, learned: "_Rows", rows: "_Rows", trivial: Baseline | None) -> list[str]:
        """Return a clause for each column of a table that determines the label alone."""
        if self.task.processor.modality != "row" or trivial is None:
            return []
        perfect = 1.0 if self.metric.mode == "max" else 0.0
        few, others = learned.spread(_MAX_COLUMN_ROWS), rows.spread(_MAX_COLUMN_ROWS)
        _, counts = np.unique(others.targets.batch(others.values), axis=0, return_counts=True)
        if len(others.values) - counts.max() < _MIN_LEAK:
            return []
        clauses = []
        table = _table(few, others)
        for name in list(table)[:_MAX_COLUMNS]:
            cells = table[[name]].to_numpy()
            outputs = _fitted(_tree, cells[: len(few.values)], few, cells[len(few.values) :])
            gained = self._score(outputs, others.values) - trivial.value
            if perfect != trivial.value and gained / (perfect - trivial.value) >= _LEAK:
                clauses.append(f"column {name!r} alone determines the label")
        return clauses

    def _repeated(self, name: str, learned: "_Rows", rows: "_Rows") -> list[str]:
        """Return a clause with the share of rows that nearly equal training rows. Preparation finds equal ones."""
        keys = _KEYS.get(self.task.processor.modality)
        # It is a lower bound: training rows that were not read may repeat more of them.
        share = max((_share_repeated(*pair) for pair in keys(learned, rows)), default=0.0) if keys else 0.0
        return [f"{share:.0%} of the {name} rows nearly equal training rows"] if share > _MAX_REPEATED else []

    def _score(self, outputs: Tensor, values: Sequence[Any]) -> float:
        return self.metric.of(outputs, torch.from_numpy(self.train.targets.batch(values)))


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
    """Return the rows that checks of inputs read: none where there is no such check."""
    if (count := _MAX_ROWS.get(dataset.processor.modality)) is None:
        return _Rows([], [], dataset)
    sample = _places_of(dataset, _SAMPLED)
    if characters := sum(int(dataset.lengths[place]) for place in sample):
        count = max(1, min(count, _MAX_CHARACTERS * len(sample) // characters))
    return _Rows(*dataset.split.take(_places_of(dataset, count)), dataset)


def _values_of(dataset: LabelledDataset) -> tuple[Sequence[Any], int]:
    """Return the values of some rows, and the number of rows that they are a sample of."""
    split, num_outputs = dataset.split, dataset.targets.num_outputs
    count = min(_MAX_CONSTANT_ROWS, max(1, _MAX_OUTPUTS // num_outputs))
    is_counted = split.shards is None or split.shards.has_class_counts
    if dataset.targets.rule.kept_as != "class" or not is_counted:
        return split.values(_places_of(dataset, count)), len(dataset)
    totals = np.cumsum(split.class_counts(num_outputs))
    values: list[int] = totals.searchsorted(spread(len(dataset), count), side="right").tolist()
    # It is no sample: each class has its share of the rows.
    return values, len(values)


def _places_of(dataset: LabelledDataset, count: int) -> list[int]:
    """Return the numbers of at most ``count`` rows, spread over ``_MAX_SHARDS`` shards."""
    if (shards := dataset.shards) is None:
        return spread(len(dataset), count)
    bounds = shards.first_rows
    opened = spread(len(bounds) - 1, _MAX_SHARDS)
    rows = np.concatenate([np.arange(bounds[number], bounds[number + 1]) for number in opened])
    places: list[int] = rows[spread(len(rows), count)].tolist()
    return places


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


def _fitted(make: Callable[[str], Any], vectors: Any, learned: _Rows, others: Any) -> Tensor:
    """Fit a model of scikit-learn to training rows. Return its outputs for others, in the task's layout."""
    kind, given = learned.targets.rule.kept_as, learned.targets.batch(learned.values)
    model = make(kind).fit(vectors, given)
    if kind == "number":
        return torch.as_tensor(model.predict(others), dtype=torch.float32).reshape(-1, 1)
    if kind == "classes":
        chosen = torch.as_tensor(model.predict(others), dtype=torch.float32)
        return 2.0 * chosen.reshape(-1, learned.targets.num_outputs) - 1.0
    outputs = np.full((others.shape[0], learned.targets.num_outputs), np.log(1e-9), np.float32)
    outputs[:, model.classes_] = np.log(np.clip(model.predict_proba(others), 1e-9, 1.0))
    return torch.from_numpy(outputs)


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
    # A text of emoji has no letters.
    return "".join(filter(str.isalnum, text.casefold())) or text


def _row_keys(learned: _Rows, rows: _Rows) -> Iterator[Sequence[Keys]]:
    """Yield a hash of each row without one of its columns, such as an id."""
    import pandas as pd

    table = pd.DataFrame([dict(row) for row in (*learned.inputs, *rows.inputs)]).astype(str)
    cells = [
        pd.util.hash_array(table[name].to_numpy(object), hash_key=f"{place:016}") for place, name in enumerate(table)
    ]
    whole, count = np.sum(cells, axis=0, dtype=np.uint64), len(learned.values)
    different = np.array([len(np.unique(own[:count])) for own in cells])
    for place, own in enumerate(cells[:_MAX_COLUMNS]):
        first, second = np.split(whole - own, [count])
        # Where columns tell rows apart only together, rows agree by chance.
        are_telling = np.delete(different, place) >= _TELLING * len(np.unique(first))
        if are_telling.sum() >= _MIN_TELLING:
            yield first, second


_KEYS: Mapping[str, Callable[[_Rows, _Rows], Iterator[Sequence[Keys]]]] = {"text": _text_keys, "row": _row_keys}


def _share_repeated(learned: Keys, rows: Keys) -> float:
    """Return the share of rows whose key a training row has; 0 if few keys differ, so that rows agree by chance."""
    is_telling = len(np.unique(learned)) >= _MIN_DISTINCT * len(learned)
    return float(np.isin(rows, learned).mean()) if is_telling else 0.0


def _noise(made: Predictions) -> float:
    """Return the share of the rows whose label is likely wrong; 0 if that does not explain most errors.

    The probabilities of an overconfident model do not show it. Neither do those that many rows share: in a group of
    like rows, the rarer label is not wrong.
    """
    from app.data.label_noise import doubted, mean_probabilities

    probabilities, classes = softmax(made.outputs.numpy()), made.targets.numpy()
    if len(np.unique(probabilities.max(-1).round(_DIGITS))) < _MIN_VARIED * len(classes):
        return 0.0
    chosen = probabilities.argmax(-1)
    errors = chosen != classes
    if probabilities.max(-1).mean() - (1.0 - errors.mean()) > _MAX_OVERCONFIDENCE:
        return 0.0
    own = probabilities[np.arange(len(classes)), classes]
    suspects = doubted(probabilities, classes, mean_probabilities(own, classes, probabilities.shape[1])) >= 0
    share = float(suspects.mean())
    is_noise = share >= _MIN_NOISY and suspects.sum() >= max(_MIN_NOISY_ROWS, _MIN_EXPLAINED * errors.sum())
    return share if is_noise else 0.0
