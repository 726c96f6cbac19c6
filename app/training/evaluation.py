"""Predictions of a trained model for the validation split: scores by label, calibration, and the worst samples.

The page of a run shows them, so samples, time and the size of the model are bounded.
"""

import base64
import heapq
import io
import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from upath import UPath

from app.artifacts import WEIGHTS_FILE
from app.best_effort import attempt
from app.config import Recipe, TrainConfig
from app.data.labelled import CollatingTargets, LabelledData
from app.data.pairs import PairData
from app.data.prepared import IGNORED, VALIDATION, Dataset, PreparedData
from app.data.processor import GroupingProcessor, Processor
from app.data.targets import Answer, Classes, LabelSets, Numbers, Targets, softmax
from app.data.tokenizer import LanguageTokenizer
from app.models.factory import blueprint_of, logits_of
from app.storage import local_copy
from app.tasks import ServedTask, Task, find_task
from app.tasks.judgement import Predictions, places_of, spread
from app.telemetry.evaluation import Calibration, Evaluation, LabelScore, WorstSample
from app.telemetry.judgement import Judgement

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

_MAX_POINTS = 1000
"""Maximum points in a chart."""
_MAX_OUTPUTS = 2**26
"""Maximum numbers of a model's outputs in memory."""

Prediction = tuple[Sequence[int], NDArray[Any], Tensor]
"""Rows, their targets, and the float32 logits of shape (batch, …, classes)."""


NO_SCORES: Mapping[str, float] = {}


def write_evaluation(
    weights: UPath, data: PreparedData, recipe: Recipe, run_folder: UPath, scores: Mapping[str, float] = NO_SCORES
) -> Evaluation:
    """Evaluate the model of a weights folder as ``evaluate`` does, and write ``evaluation.json``."""
    evaluation = evaluate(weights, data, recipe, scores)
    evaluation.save(run_folder)
    return evaluation


def evaluate(weights: UPath, data: PreparedData, recipe: Recipe, scores: Mapping[str, float] = NO_SCORES) -> Evaluation:
    """Run the model on this machine's CPU over ``train.report_samples`` rows, spread over the validation split.

    It takes at most 30 s, and 30 s more for training rows if it is judged. A model over 1 GiB is not run.
    ``scores`` are those of the whole split, by their names ``val_NAME``; without them, the model is not judged.
    """
    split = data.validation
    size = (weights / WEIGHTS_FILE).stat().st_size
    if size > _MAX_WEIGHTS_BYTES:
        return Evaluation(rows=0, of=len(split), skipped=f"the weights take {size / 2**30:.1f} GiB, more than 1 GiB")
    model, task = _load_model(weights, data, recipe), find_task(recipe.task)
    judged = partial(_judge, task, model, data, recipe, scores)
    if isinstance(data, PairData):
        return _of_pairs(data, model, recipe.train).model_copy(update={"judgement": judged(())})
    predictions = _predictions(model, data, split, spread(len(split), recipe.train.report_samples))
    if (
        isinstance(task, ServedTask)
        and isinstance(data, LabelledData)
        and not isinstance(data.targets, CollatingTargets)
    ):
        made = list(_bounded(predictions))
        return _of_examples(data, task, made).model_copy(update={"judgement": judged(made)})
    losses = _RowLosses()
    watched = losses.watch(predictions)
    judgement = judged(watched)
    # If nothing judges the model, the predictions are not made yet.
    deque(watched, maxlen=0)
    return losses.evaluation(data).model_copy(update={"judgement": judgement})


def _judge(
    task: Task,
    model: nn.Module,
    data: PreparedData,
    recipe: Recipe,
    scores: Mapping[str, float],
    made: Iterable[Prediction],
) -> Judgement | None:
    """Return the judgement of a model, which a judge may also run on training rows. None: nothing judges it."""

    def judgement() -> Judgement | None:
        judge = task.judge(recipe, data)
        if judge is None or not scores:
            return None
        few = places_of(data.train, recipe.train.report_samples)
        trained = _as_judged(_predictions(model, data, data.train, few))
        return judge.judge(VALIDATION, data.validation, scores[f"val_{judge.metric.name}"], _as_judged(made), trained)

    return attempt(judgement, "the run has no verdict", "the job")


def _as_judged(made: Iterable[Prediction]) -> Iterator[Predictions]:
    return (Predictions(outputs, torch.from_numpy(targets)) for _, targets, outputs in made)


def _bounded(made: Iterable[Prediction]) -> Iterator[Prediction]:
    """Yield predictions until their outputs take ``_MAX_OUTPUTS`` numbers."""
    kept = 0
    for prediction in made:
        yield prediction
        kept += prediction[-1].numel()
        if kept > _MAX_OUTPUTS:
            return


def _load_model(weights: UPath, data: PreparedData, recipe: Recipe) -> nn.Module:
    with local_copy(weights) as folder:
        tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE, backend="pread")
    return blueprint_of(recipe.model, data.facts).load(tensors).eval()


def _batch_rows(data: PreparedData) -> int:
    return max(1, _BATCH_TOKENS // data.tokens_per_sample) if data.tokens_per_sample else _BATCH_ROWS


def _of_examples(data: LabelledData, task: ServedTask, predictions: Iterable[Prediction]) -> Evaluation:
    """Return the worst samples of any task, and for labels their scores and the calibration."""
    worst: list[tuple[float, int, NDArray[np.float32]]] = []  # loss, row, outputs
    counts, num_rows = _LabelCounts.of(data.targets), 0
    numbers: list[tuple[float, float]] = []  # true, predicted
    for rows, true, outputs in predictions:
        targets, given = torch.from_numpy(true), outputs.numpy()
        losses = functional.cross_entropy(outputs, targets, reduction="none") if task.learns_classes else None
        found = task.loss(outputs, targets) if losses is None else losses
        worst += zip(found.tolist(), rows, given, strict=True)
        # After each batch, so that few outputs are kept.
        worst = heapq.nlargest(_WORST_SAMPLES, worst, key=lambda sample: sample[0])
        num_rows += len(rows)
        if counts:
            counts.add(given, true)
        if isinstance(data.targets, Numbers):
            values = data.targets.scale.mean + data.targets.scale.std * true.astype(float)
            found_values = (answer["value"] for answer in data.targets.decode(given))
            numbers += zip(values.tolist(), found_values, strict=True)
    return Evaluation(
        rows=num_rows,
        of=len(data.validation),
        labels=data.targets.labels,
        matrix=counts.matrix.tolist() if counts and counts.matrix is not None else None,
        scores=counts.scores(data.targets.labels) if counts else [],
        numbers=[numbers[place] for place in spread(len(numbers), _MAX_POINTS)],
        calibration=counts.calibration if counts else None,
        worst=[_worst_example(data, task, *sample) for sample in worst],
    )


@dataclass
class _LabelCounts:
    """Rows by label, over batches of outputs."""

    right: NDArray[np.int64]
    """Rows with each label for which it is predicted, of shape (labels,)."""
    predicted: NDArray[np.int64]
    true: NDArray[np.int64]
    matrix: NDArray[np.int64] | None
    """Of classes: rows by true and by predicted label. None: there are too many, or rows have several labels."""
    probabilities: list[NDArray[np.floating[Any]]] = field(default_factory=list)
    hits: list[NDArray[np.bool_]] = field(default_factory=list)
    """Whether each prediction whose probability is counted is right."""

    @classmethod
    def of(cls, targets: Targets) -> "_LabelCounts | None":
        """Return counts of nothing yet; None for targets without labels."""
        if not isinstance(targets, Classes | LabelSets):
            return None
        num = targets.num_outputs
        matrix = np.zeros((num, num), np.int64) if isinstance(targets, Classes) and num <= _MAX_LABELS else None
        right, predicted, true = np.zeros((3, num), np.int64)
        return cls(right, predicted, true, matrix)

    def add(self, outputs: NDArray[np.float32], targets: NDArray[Any]) -> None:
        """Add rows: of classes, int64 targets of shape (rows,); of sets of labels, 0 and 1 of shape (rows, labels)."""
        if targets.ndim == 1:
            probabilities = softmax(outputs)
            chosen = outputs.argmax(-1)
            self.probabilities.append(probabilities.max(-1))
            self.hits.append(chosen == targets)
            if self.matrix is not None:
                np.add.at(self.matrix, (targets, chosen), 1)
            num = len(self.true)
            given, true = np.eye(num, dtype=bool)[chosen], np.eye(num, dtype=bool)[targets]
        else:
            given, true = outputs > 0, targets > 0.5
            self.probabilities.append((1.0 / (1.0 + np.exp(-outputs))).ravel())
            self.hits.append(true.ravel())
        self.right += (given & true).sum(0)
        self.predicted += given.sum(0)
        self.true += true.sum(0)

    def scores(self, labels: Sequence[str]) -> list[LabelScore]:
        """Return the scores of each label."""
        counts = zip(labels, self.right.tolist(), self.predicted.tolist(), self.true.tolist(), strict=True)
        return [LabelScore.of(*of_label) for of_label in counts]

    @property
    def calibration(self) -> Calibration | None:
        """The calibration of all predictions; None if there are none."""
        return Calibration.of(np.concatenate(self.probabilities), np.concatenate(self.hits)) if self.hits else None


def _of_pairs(data: PairData, model: nn.Module, config: TrainConfig) -> Evaluation:
    """Return the anchors whose own positive is hardest to find among the positives of the evaluated pairs."""
    pairs, texts = data.validation.pairs, data.validation.texts
    ordered = sorted(spread(len(pairs), config.report_samples), key=lambda pair: len(texts[2 * pair]))
    parts = [ordered[first : first + _BATCH_ROWS] for first in range(0, len(ordered), _BATCH_ROWS)]
    # Both texts of a pair are in one batch, because the time may be over after any of them.
    found = list(
        _batch_predictions(
            model, data.validation, [[2 * pair + side for side in (0, 1) for pair in part] for part in parts]
        )
    )
    evaluated = [pair for part in parts[: len(found)] for pair in part]
    sides = [functional.normalize(vectors, dim=-1).chunk(2) for _, _, vectors in found]
    anchors, positives = (torch.cat(side) for side in zip(*sides, strict=True))
    cosines = anchors @ positives.T
    losses = functional.cross_entropy(cosines / config.temperature, torch.arange(len(cosines)), reduction="none")
    samples = zip(losses.tolist(), evaluated, cosines.argmax(1).tolist(), strict=True)
    return Evaluation(
        rows=len(evaluated),
        of=len(pairs),
        worst=[
            WorstSample(
                loss=loss,
                text=shorten(pairs[pair][0]),
                label=shorten(pairs[pair][1]),
                predicted=shorten(pairs[evaluated[nearest]][1]),
                probability=float(np.exp(-loss)),
            )
            for loss, pair, nearest in heapq.nlargest(_WORST_SAMPLES, samples)
        ],
    )


@dataclass
class _RowLosses:
    """The mean loss of each row whose tokens are predicted. Outputs are not kept."""

    losses: list[tuple[float, int]] = field(default_factory=list)
    """With the row."""

    def watch(self, predictions: Iterable[Prediction]) -> Iterator[Prediction]:
        """Yield predictions on, and note their losses."""
        for rows, true, logits in predictions:
            targets = torch.from_numpy(true)
            # ``cross_entropy`` expects the classes as the second dimension.
            values = functional.cross_entropy(logits.mT, targets, ignore_index=IGNORED, reduction="none").sum(-1)
            # A row may have no target that counts.
            means = values / (targets != IGNORED).sum(-1).clamp(min=1)
            self.losses += zip(means.tolist(), rows, strict=True)
            yield rows, true, logits

    def evaluation(self, data: PreparedData) -> Evaluation:
        """Return the rows with the highest losses."""
        worst = sorted(self.losses, reverse=True)[:_WORST_SAMPLES]
        return Evaluation(
            rows=len(self.losses),
            of=len(data.validation),
            worst=[WorstSample(loss=loss, text=_text_of(data, row)) for loss, row in worst],
        )


def _predictions(model: nn.Module, data: PreparedData, split: Dataset, rows: Sequence[int]) -> Iterator[Prediction]:
    """Yield the predictions for rows of a split, until the time is over."""
    # Rows of similar lengths need little padding in a batch.
    ordered, size = sorted(rows, key=lambda row: int(split.lengths[row])), _batch_rows(data)
    yield from _batch_predictions(model, split, [ordered[at : at + size] for at in range(0, len(ordered), size)])


def _batch_predictions(model: nn.Module, split: Dataset, batches: Sequence[Sequence[int]]) -> Iterator[Prediction]:
    """Yield the predictions for batches of rows, until the time is over."""
    deadline_s = time.monotonic() + _MAX_SECONDS
    for rows in batches:
        batch = split.batch(rows)
        inputs = {name: torch.from_numpy(tensor) for name, tensor in batch.inputs.items()}
        with torch.inference_mode():
            yield rows, batch.targets, logits_of(model(**inputs)).float()
        # After a batch and not before it, so that a slow model has predictions, too.
        if time.monotonic() > deadline_s:
            return


def _worst_example(
    data: LabelledData, task: ServedTask, loss: float, row: int, outputs: NDArray[np.float32]
) -> WorstSample:
    split = data.validation.split
    text, picture = _media_of(split.inputs[row], data.processor)
    (answer,) = task.answer(outputs[None], data.targets)
    return WorstSample(
        loss=loss,
        text=shorten(text) if text else None,
        png_base64=_to_png(picture) if picture else None,
        label=_in_words(split.classes[row], data.targets.labels),
        predicted=_in_short(answer),
        # The loss is the negative logarithm of the label's probability.
        probability=float(np.exp(-loss)) if task.learns_classes else None,
    )


def _media_of(given: Any, processor: Processor) -> tuple[str | None, bytes | None]:
    """Return the text and the picture of an input, as far as it has them."""
    if isinstance(processor, GroupingProcessor):
        return processor.split_media(given)
    if isinstance(given, str):
        return given, None
    if processor.modality == "row":
        return json.dumps(given, ensure_ascii=False), None
    return (None, given) if processor.modality == "image" else (f"{len(given):,} bytes of {processor.modality}", None)


def _in_words(value: Any, labels: Sequence[str]) -> str:
    """Return the value of an example: a class, several classes, or a number."""
    if not labels:
        return f"{value:g}" if isinstance(value, float) else str(value)
    return ", ".join(labels[index] for index in (value if isinstance(value, list) else [value])) or "none"


def _in_short(answer: Answer) -> str:
    """Return what a task answers, in a few words."""
    values = {name: value for name, value in answer.items() if name != "scores"}
    (value, *others) = values.values()
    if others:
        return json.dumps(values, ensure_ascii=False)
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _text_of(data: PreparedData, row: int) -> str:
    if isinstance(data, LabelledData):
        return shorten(str(data.validation.split.inputs[row]))
    tokenizer: LanguageTokenizer = getattr(data, "tokenizer")  # noqa: B009 - of documents and chats
    tokens: NDArray[np.int64] = data.validation.batch([row]).inputs["input_ids"][0]
    return shorten(tokenizer.decode(tokens.tolist()))


def shorten(text: str) -> str:
    """Return a text, or as much of it as a page shows."""
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} …"


def _to_png(content: bytes) -> str:
    """Return an image, made small, as PNG in base64."""
    from app.data.images import read_picture  # most tasks have no images

    return small_png(read_picture(content))


def small_png(image: "Image.Image") -> str:
    """Return a small copy of a grey or RGB image, as PNG in base64."""
    small, buffer = image.copy(), io.BytesIO()
    small.thumbnail((_PICTURE_SIZE, _PICTURE_SIZE))
    small.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()
