"""Signs of faulty data: columns that reveal the label, repeated rows, and noise in the labels."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from app.data.targets import softmax
from app.tasks.judgement.base import Predictions
from app.tasks.judgement.rows import Rows

if TYPE_CHECKING:  # it takes long to import
    import pandas as pd

MAX_COLUMNS = 200
_MAX_REPEATED, _MIN_DISTINCT = 0.1, 0.2
"""Maximum share of rows that nearly equal training rows. Minimum share of distinct keys: below it, that is chance."""
_TELLING, _MIN_TELLING = 0.9, 3
"""Minimum share of a table's distinct rows that one column tells apart, and minimum number of such columns. With fewer,
rows may be equal by chance. Two columns may mean the same, such as a name and its number."""
_MIN_NOISY, _MIN_NOISY_ROWS, _MIN_EXPLAINED = 0.05, 10, 0.6
"""Minimum share and number of rows with doubtful labels, and minimum share of the errors, to count as noise."""
_MAX_OVERCONFIDENCE = 0.1
_MIN_VARIED, _DIGITS = 0.5, 4
"""Minimum share of rows with different probabilities, in this many digits, if a model knows more than group shares."""

Keys = NDArray[Any]
"""The values by which rows are compared, of shape (rows,)."""


def table_of(learned: Rows, rows: Rows) -> "pd.DataFrame":
    """Return both as one numeric table, with 0 for a missing number and a code for each category."""
    import pandas as pd

    table = pd.DataFrame([dict(row) for row in (*learned.inputs, *rows.inputs)])

    def numbered(cells: "pd.Series[Any]") -> "pd.Series[Any]":
        if pd.api.types.is_numeric_dtype(cells):
            return cells.fillna(0.0)
        return pd.Series(pd.factorize(cells.astype(str))[0], cells.index)

    return table.apply(numbered)


def _text_keys(learned: Rows, rows: Rows) -> Iterator[Sequence[Keys]]:
    """Yield the texts in one case, without spaces and punctuation."""
    first, second = (np.array([_letters(text) for text in some.inputs], object) for some in (learned, rows))
    yield [first, second]


def _letters(text: str) -> str:
    # A text of emoji has no letters.
    return "".join(filter(str.isalnum, text.casefold())) or text


def _row_keys(learned: Rows, rows: Rows) -> Iterator[Sequence[Keys]]:
    """Yield a hash of each row without one column, such as an id."""
    import pandas as pd

    table = pd.DataFrame([dict(row) for row in (*learned.inputs, *rows.inputs)]).astype(str)
    cells = [
        pd.util.hash_array(table[name].to_numpy(object), hash_key=f"{place:016}") for place, name in enumerate(table)
    ]
    whole, count = np.sum(cells, axis=0, dtype=np.uint64), len(learned.values)
    different = np.array([len(np.unique(own[:count])) for own in cells])
    for place, own in enumerate(cells[:MAX_COLUMNS]):
        first, second = np.split(whole - own, [count])
        # If only several columns together tell rows apart, rows may be equal by chance.
        are_telling = np.delete(different, place) >= _TELLING * len(np.unique(first))
        if are_telling.sum() >= _MIN_TELLING:
            yield first, second


KEYS: Mapping[str, Callable[[Rows, Rows], Iterator[Sequence[Keys]]]] = {"text": _text_keys, "row": _row_keys}


def repeated(name: str, learned: Rows, rows: Rows) -> list[str]:
    """Return a clause with the share of rows that nearly equal training rows. Preparation finds exact duplicates."""
    keys = KEYS.get(learned.dataset.processor.modality)
    # A lower bound, because unread training rows may repeat more of them.
    share = max((_share_repeated(*pair) for pair in keys(learned, rows)), default=0.0) if keys else 0.0
    return [f"{share:.0%} of the {name} rows nearly equal training rows"] if share > _MAX_REPEATED else []


def _share_repeated(learned: Keys, rows: Keys) -> float:
    """Return the share of rows with a training row's key; 0 if few keys are distinct, so that equality is chance."""
    is_telling = len(np.unique(learned)) >= _MIN_DISTINCT * len(learned)
    return float(np.isin(rows, learned).mean()) if is_telling else 0.0


def noise(made: Predictions) -> float:
    """Return the share of rows whose label is likely wrong; 0 if that does not explain most errors.

    The probabilities of an overconfident model do not show noise. Neither do probabilities that many rows share: in a
    group of similar rows, the rarer label is not wrong.
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
