"""Predictions of a trained model for the validation split: a confusion matrix, and the samples with the largest loss.

The page of a run shows them, so samples, time and the size of the model are bounded.
"""

import base64
import io
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from upath import UPath

from app.artifacts import WEIGHTS_FILE
from app.config import Recipe
from app.data.classification import ClassificationData
from app.data.prepared import IGNORED, Batch, PreparedData
from app.data.tokenizer import LanguageTokenizer
from app.models.factory import blueprint_of, logits_of
from app.reports.evaluation import EVALUATION_FILE, Evaluation, WorstSample
from app.storage import local_copy, write_atomically

if TYPE_CHECKING:
    from PIL import Image

_MAX_SECONDS = 30.0
_MAX_WEIGHTS_BYTES = 2**30
_BATCH_ROWS, _BATCH_TOKENS = 64, 2048
_WORST_SAMPLES = 20
_MAX_TEXT = 300
_PICTURE_SIZE = 96
_MAX_LABELS = 50
"""Labels up to which a confusion matrix is kept. A larger one cannot be read."""

Prediction = tuple[Sequence[int], Batch, Tensor]
"""Rows, their batch, and its float32 logits of shape (batch, …, classes)."""


def write_evaluation(weights: UPath, data: PreparedData, recipe: Recipe, run_folder: UPath) -> None:
    """Evaluate the model of a weights folder, and write ``evaluation.json``."""
    write_atomically(run_folder / EVALUATION_FILE, evaluate(weights, data, recipe).model_dump_json().encode())


def evaluate(weights: UPath, data: PreparedData, recipe: Recipe) -> Evaluation:
    """Run the model on this machine's CPU over ``train.report_samples`` rows, spread over the validation split.

    It takes 30 s at most. A model over 1 GiB is not run.
    """
    split = data.validation
    size = (weights / WEIGHTS_FILE).stat().st_size
    if size > _MAX_WEIGHTS_BYTES:
        return Evaluation(rows=0, of=len(split), skipped=f"the weights take {size / 2**30:.1f} GiB, more than 1 GiB")
    chosen = np.unique(np.linspace(0, len(split) - 1, min(recipe.train.report_samples, len(split)), dtype=int))
    # Rows of similar lengths need little padding in a batch.
    ordered = sorted(chosen.tolist(), key=lambda row: int(split.lengths[row]))
    rows = _batch_rows(data)
    batches = [ordered[first : first + rows] for first in range(0, len(ordered), rows)]
    predictions = _predictions(_load_model(weights, data, recipe), data, batches)
    return _of_classes(data, predictions) if isinstance(data, ClassificationData) else _of_tokens(data, predictions)


def _load_model(weights: UPath, data: PreparedData, recipe: Recipe) -> nn.Module:
    with local_copy(weights) as folder:
        tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE, backend="pread")
    return blueprint_of(recipe.model, data.facts).load(tensors).eval()


def _batch_rows(data: PreparedData) -> int:
    return max(1, _BATCH_TOKENS // data.tokens_per_sample) if data.tokens_per_sample else _BATCH_ROWS


def _of_classes(data: ClassificationData, predictions: Iterable[Prediction]) -> Evaluation:
    counts = np.zeros((len(data.labels), len(data.labels)), np.int64)
    losses: list[tuple[float, int, int]] = []  # loss, row, predicted class
    for rows, batch, logits in predictions:
        predicted = logits.argmax(-1)
        targets = torch.from_numpy(batch.targets)
        np.add.at(counts, (batch.targets, predicted.numpy()), 1)
        values = functional.cross_entropy(logits, targets, reduction="none")
        losses += zip(values.tolist(), rows, predicted.tolist(), strict=True)
    worst = sorted(losses, reverse=True)[:_WORST_SAMPLES]
    return Evaluation(
        rows=len(losses),
        of=len(data.validation),
        labels=data.labels,
        matrix=counts.tolist() if len(data.labels) <= _MAX_LABELS else None,
        worst=[_worst_of_class(data, *sample) for sample in worst],
    )


def _of_tokens(data: PreparedData, predictions: Iterable[Prediction]) -> Evaluation:
    losses: list[tuple[float, int]] = []  # mean loss, row
    for rows, batch, logits in predictions:
        targets = torch.from_numpy(batch.targets)
        # ``cross_entropy`` expects the classes as the second dimension.
        values = functional.cross_entropy(logits.mT, targets, ignore_index=IGNORED, reduction="none").mean(-1)
        losses += zip(values.tolist(), rows, strict=True)
    worst = sorted(losses, reverse=True)[:_WORST_SAMPLES]
    return Evaluation(
        rows=len(losses),
        of=len(data.validation),
        worst=[WorstSample(loss=loss, text=_text_of(data, row)) for loss, row in worst],
    )


def _predictions(model: nn.Module, data: PreparedData, batches: Sequence[Sequence[int]]) -> Iterator[Prediction]:
    """Yield predictions, until the time is over."""
    deadline_s = time.monotonic() + _MAX_SECONDS
    for rows in batches:
        batch = data.validation.batch(rows)
        inputs = {name: torch.from_numpy(tensor) for name, tensor in batch.inputs.items()}
        with torch.inference_mode():
            yield rows, batch, logits_of(model(**inputs)).float()
        # After a batch and not before it, so that a slow model has predictions, too.
        if time.monotonic() > deadline_s:
            return


def _worst_of_class(data: ClassificationData, loss: float, row: int, predicted: int) -> WorstSample:
    split = data.validation.split
    given = split.inputs[row]
    return WorstSample(
        loss=loss,
        text=shorten(given) if isinstance(given, str) else None,
        png_base64=None if isinstance(given, str) else _to_png(given),
        label=data.labels[split.classes[row]],
        predicted=data.labels[predicted],
        # The loss is the negative logarithm of the label's probability.
        probability=float(np.exp(-loss)),
    )


def _text_of(data: PreparedData, row: int) -> str:
    tokenizer: LanguageTokenizer = getattr(data, "tokenizer")  # noqa: B009 - of documents and chats
    tokens: NDArray[np.int64] = data.validation.batch([row]).inputs["input_ids"][0]
    return shorten(tokenizer.decode(tokens.tolist()))


def shorten(text: str) -> str:
    """Return a text, or as much of it as a page shows."""
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} …"


def _to_png(content: bytes) -> str:
    """Return an image, made small, as PNG in base64."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        # PNG cannot hold all modes that images have, such as CMYK.
        return small_png(image.convert("L" if image.mode in ("1", "L") else "RGB"))


def small_png(image: "Image.Image") -> str:
    """Return a small copy of a grey or RGB image, as PNG in base64."""
    small, buffer = image.copy(), io.BytesIO()
    small.thumbnail((_PICTURE_SIZE, _PICTURE_SIZE))
    small.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()
