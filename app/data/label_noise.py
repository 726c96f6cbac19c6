"""Texts whose label is likely wrong, by confident learning (Northcutt et al. 2021, JAIR 70, arXiv:1911.00068).

A linear model of character n-grams judges each text that it was not trained on. A label is suspect if the model gives
another class at least the probability that texts of that class have on average.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax
from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer
from sklearn.linear_model import LogisticRegression
from upath import UPath

from app.errors import DataError
from app.storage import stream_atomically

_FOLDS = 5
_FEATURES, _WEIGHTS = 2**16, 2**20
"""Features of a text, and maximum weights of a model: with many classes there are fewer features."""
_MAX_CLASSES, _PROBABILITIES = 1000, 2**24
"""Maximum number of classes, and of probabilities in memory at a time."""
READ_CHARACTERS = 2000
"""Characters of a text that are read. Reading more takes longer, and changes little."""
_MAX_SHOWN = 120
LEARNED_CHARACTERS = 4_000_000
"""Maximum characters of text to train the models on. Each takes about 60 bytes."""
FINE = -1
"""Suggested class of a text whose label is not suspect."""


@dataclass(frozen=True)
class LabelJudge:
    """A model for each fold, trained on the texts of the other folds. A text's key decides its fold."""

    labels: NDArray[np.str_]
    weights: NDArray[np.float32]
    """Of shape (folds, features, classes)."""
    biases: NDArray[np.float32]
    """Of shape (folds, classes)."""
    thresholds: NDArray[np.float64]
    """Mean probability of each class over its own texts, of shape (classes,)."""

    @classmethod
    def fit(cls, texts: Sequence[str], classes: NDArray[Any], keys: NDArray[np.uint64], labels: Sequence[str]) -> Self:
        """Fit the models to training texts, given the label index and the hash of each text.

        Raises:
            DataError: there are too many classes, or too few texts for each fold to have two classes.
        """
        if len(labels) > _MAX_CLASSES:
            raise DataError(
                f"data.clean.label_noise is for {_MAX_CLASSES:,} labels at most, and the data have {len(labels):,}: "
                "leave it out"
            ).of("labels.too_many", "data.clean.label_noise")
        chosen = np.argsort(keys, kind="stable")[: _PROBABILITIES // len(labels)]
        texts, classes, keys = [texts[row] for row in chosen.tolist()], classes[chosen], keys[chosen]
        count = min(_FEATURES, 2 ** int(np.log2(_WEIGHTS / len(labels))))
        weights = np.zeros((_FOLDS, count, len(labels)), np.float32)
        biases = np.full((_FOLDS, len(labels)), -np.inf, np.float32)
        vectors, folds = _vectors_of(texts, count), keys % np.uint64(_FOLDS)
        for fold in range(_FOLDS):
            others = folds != fold
            found = np.unique(classes[others])
            if len(found) < 2:
                raise DataError(
                    f"data.clean.label_noise learns from {len(texts):,} training texts, of which {int(others.sum()):,} "
                    "have fewer than two classes: give more, or leave it out"
                ).of("labels.too_few", "data.clean.label_noise")
            model = LogisticRegression(C=4.0, max_iter=500).fit(vectors[others], classes[others])
            # With two classes, the model has weights for the second one only.
            places = found if len(found) > 2 else found[1:]
            weights[fold][:, places], biases[fold, found] = model.coef_.T, 0.0
            biases[fold, places] = model.intercept_
        judge = cls(np.array(labels, np.str_), weights, biases, np.ones(len(labels)))
        own = judge._probabilities(vectors, folds)[np.arange(len(texts)), classes]
        # A class with texts in one fold only is never suggested.
        return cls(judge.labels, weights, biases, mean_probabilities(own, classes, len(labels)))

    def suggest(self, texts: Sequence[str], classes: NDArray[Any], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the likelier class of each text, of shape (texts,); ``FINE`` where its own is not suspect."""
        if not texts:
            return np.empty(0, np.int64)
        probabilities = self._probabilities(_vectors_of(texts, self.weights.shape[1]), keys % np.uint64(_FOLDS))
        return doubted(probabilities, classes, self.thresholds)

    def _probabilities(self, vectors: Any, folds: NDArray[np.uint64]) -> NDArray[np.float64]:
        """Return the out-of-fold class probabilities of each text, of shape (texts, classes)."""
        logits = np.empty((vectors.shape[0], len(self.labels)))
        for fold in range(_FOLDS):
            mine = np.flatnonzero(folds == fold)
            logits[mine] = vectors[mine] @ self.weights[fold] + self.biases[fold]
        probabilities: NDArray[np.float64] = softmax(logits, axis=1)
        return probabilities

    def save(self, path: UPath) -> None:
        """Write the models for ``load``."""
        with stream_atomically(path) as file:
            np.savez(file, **vars(self))

    @classmethod
    def load(cls, path: UPath) -> Self:
        """Return what ``save`` wrote."""
        with np.load(BytesIO(path.read_bytes())) as arrays:
            return cls(**arrays)


def mean_probabilities(own: NDArray[Any], classes: NDArray[Any], num_classes: int) -> NDArray[np.float64]:
    """Return the mean probability of each class over its own rows, of shape (classes,); infinite for one without rows.

    Args:
        own: the probability of each row's own class.
        classes: the class of each row.
    """
    sums, counts = (np.bincount(classes, given, num_classes) for given in (own, None))
    means: NDArray[np.float64] = np.divide(sums, counts, out=np.full(num_classes, np.inf), where=sums > 0.0)
    return means


def doubted(probabilities: NDArray[Any], classes: NDArray[Any], thresholds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the likelier class of each row, of shape (rows,); ``FINE`` where its own is not suspect.

    Args:
        probabilities: of each class, of shape (rows, classes), by a model that was not trained on the rows.
        classes: the class of each row, as labelled.
        thresholds: ``mean_probabilities``.
    """
    sure = np.where(probabilities >= thresholds, probabilities, 0.0)
    likeliest = sure.argmax(axis=1)
    # A rare class has a low threshold. So a label that the model agrees with is not suspect, as in cleanlab.
    is_doubted = (sure.max(axis=1) > 0.0) & (likeliest != classes) & (probabilities.argmax(axis=1) != classes)
    return np.where(is_doubted, likeliest, FINE)


def require_kept(before: Collection[str], after: Collection[str]) -> None:
    """Raise DataError if a label had training texts before suspect ones were dropped, and has none after that."""
    if missing := sorted(set(before) - set(after)):
        raise DataError(f"data.clean.label_noise drops every training text of {missing[0]!r}: set it to report").of(
            "labels.all_dropped", "data.clean.label_noise"
        )


def in_words(text: str, label: str, suggested: str) -> str:
    """Return the report line of a text whose label is suspect."""
    return f"{label}, likelier {suggested}: {text[:_MAX_SHOWN]}"


def _vectors_of(texts: Sequence[str], count: int) -> Any:
    """Return the frequencies of character 1- and 2-grams, a sparse matrix of shape (texts, count)."""
    hashing = HashingVectorizer(
        analyzer="char", ngram_range=(1, 2), n_features=count, alternate_sign=False, norm=None, dtype=np.float32
    )
    counts = hashing.transform(text[:READ_CHARACTERS] for text in texts)
    # Without IDF, a row does not depend on the other rows.
    return TfidfTransformer(use_idf=False, sublinear_tf=True).fit_transform(counts)
