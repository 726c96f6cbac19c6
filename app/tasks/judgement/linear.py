"""Linear models of examples, by the modality of their inputs."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from app.data.examples import Modality
from app.tasks.judgement.rows import Rows

_MAX_WEIGHTS = 2**22
"""Maximum number of weights of a linear model. With many labels, it has fewer features."""
_PICTURES, _MAX_SIDE, _MAX_PIXEL_WEIGHTS = 64, 16, 2**15
"""Pictures per encoded batch, maximum height and width of small pictures, and maximum weights of their model."""


def _text_vectors(learned: Rows, rows: Rows) -> tuple[Any, Any]:
    from sklearn.feature_extraction.text import TfidfVectorizer

    # Characters need no tokenizer, and suit every language.
    features = max(1, _MAX_WEIGHTS // learned.targets.num_outputs)
    vectors = TfidfVectorizer(analyzer="char", ngram_range=(1, 2), sublinear_tf=True, max_features=features)
    return vectors.fit_transform(learned.inputs), vectors.transform(rows.inputs)


def _row_vectors(learned: Rows, rows: Rows) -> tuple[Any, Any]:
    """Return the processor's numbers, and a column of 0 and 1 for each category."""
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


def _picture_vectors(learned: Rows, rows: Rows) -> tuple[Any, Any]:
    """Return the pixels of the pictures as the model sees them, downscaled, each with a variance of 1."""
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler()
    return scaler.fit_transform(_small_pixels(learned)), scaler.transform(_small_pixels(rows))


def _small_pixels(rows: Rows) -> NDArray[np.float32]:
    """Return pixels of shape (rows, pixels). Many labels or channels make the pictures smaller."""
    parts = []
    for start in range(0, len(rows.inputs), _PICTURES):
        (pixels,) = rows.dataset.processor.encode(rows.inputs[start : start + _PICTURES]).values()
        _, channels, height, width = pixels.shape
        weights = channels * rows.targets.num_outputs
        side = min(_MAX_SIDE, max(1, int((_MAX_PIXEL_WEIGHTS / weights) ** 0.5)))
        small = min(height, side), min(width, side)
        parts.append(functional.adaptive_avg_pool2d(torch.from_numpy(pixels), small).flatten(1).numpy())
    return np.concatenate(parts)


VECTORS: Mapping[str, Callable[[Rows, Rows], tuple[Any, Any]]] = {
    "text": _text_vectors,
    "row": _row_vectors,
    "image": _picture_vectors,
}
"""Return the inputs of training rows and of others as vectors."""


def linear_model(modality: Modality, kind: str) -> Any:
    """Return a linear model for the inputs of a modality. ``kind`` is ``LabelRule.kept_as``."""
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.multiclass import OneVsRestClassifier

    logistic = LogisticRegression(C=0.1 if modality == "image" else 4.0, max_iter=500)
    return {"class": logistic, "classes": OneVsRestClassifier(logistic), "number": Ridge()}[kind]


def tree(kind: str) -> Any:
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    return DecisionTreeRegressor(random_state=0) if kind == "number" else DecisionTreeClassifier(random_state=0)


def fitted(make: Callable[[str], Any], vectors: Any, learned: Rows, others: Any) -> Tensor:
    """Fit a scikit-learn model to training rows. Return its outputs for other rows, in the task's layout."""
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
