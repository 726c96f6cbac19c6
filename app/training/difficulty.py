"""How hard each training sample is, for ``train.curriculum``. A run records it, to resume in the same order."""

import io
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from upath import UPath

from app.config import Recipe
from app.data.labelled import LabelledData
from app.data.prepared import PreparedData
from app.data.rows import number_of
from app.errors import DataError, RecipeError, short_repr
from app.shared_files import read
from app.storage import ProgressCallback, no_op, open_storage, stream_atomically
from app.training.data.samples import samples_of

_FILE = "difficulty.npy"
_ROWS_AT_ONCE = 256


def recorded_difficulty(
    recipe: Recipe, data: PreparedData, run_folder: UPath, on_progress: ProgressCallback = no_op
) -> NDArray[np.float32]:
    """Return the difficulty of each sample that the run has recorded, of shape (samples,), or measure and record it.

    ``on_progress`` is called after each batch of rows that a model has scored.

    Raises:
        RecipeError: the task's samples have no such difficulty, or the model does not suit them.
        DataError: the column is missing, has cells that are not numbers, or has different numbers for equal texts.
    """
    if len(recorded := _recorded(run_folder)) == len(data.train):
        return recorded
    # A resumed run reads the values it started with: other values would give another order. Added sources come last.
    found = np.concatenate([recorded, find_difficulty(recipe, data, on_progress)[len(recorded) :]])
    with stream_atomically(run_folder / _FILE) as file:
        np.save(file, found, allow_pickle=False)
    return found


def _recorded(run_folder: UPath) -> NDArray[np.float32]:
    """Return what the run has recorded; of no samples if it has recorded nothing."""
    content = read(run_folder / _FILE)
    return np.load(io.BytesIO(content), allow_pickle=False) if content else np.empty(0, np.float32)


def require_difficulty(recipe: Recipe, data: PreparedData, run_folder: UPath) -> Recipe:
    """Return the recipe with the version of the curriculum's model.

    Raise the errors of ``recorded_difficulty``, without running the model.
    """
    curriculum = recipe.train.curriculum
    assert curriculum is not None
    if len(_recorded(run_folder)) == len(data.train):
        return recipe
    if curriculum.model is None:
        find_difficulty(recipe, data)
        return recipe
    from app.training.teacher import require_classifier  # it imports an engine

    labelled, storage = _labelled(data), open_storage(recipe.storage)
    title = require_classifier(curriculum.model, "train.curriculum.model", labelled, storage)
    print(f"train.curriculum: samples are ordered by the loss of {title}", flush=True)
    return recipe.with_published("curriculum", title)


def find_difficulty(recipe: Recipe, data: PreparedData, on_progress: ProgressCallback = no_op) -> NDArray[np.float32]:
    """Return how hard each training sample is, of shape (samples,)."""
    curriculum = recipe.train.curriculum
    assert curriculum is not None
    if curriculum.column is not None:
        return _by_column(recipe, _labelled(data), curriculum.column)
    if curriculum.model is not None:
        return _by_loss(recipe, _labelled(data), curriculum.model, on_progress)
    samples = samples_of(data.train)
    lengths = samples.lengths_at(np.arange(len(samples))).astype(np.float32)
    # An order by equal lengths would be no curriculum at all, and nobody would notice.
    if len(lengths) and lengths.min() == lengths.max():
        raise RecipeError(
            f"train.curriculum.by is length, and all samples of task {recipe.task} have one length: set it to loss"
        ).of("curriculum.one_length", "train.curriculum.by")
    return lengths


def _labelled(data: PreparedData) -> LabelledData:
    assert isinstance(data, LabelledData)  # recipes of other tasks are refused
    return data


def _by_column(recipe: Recipe, data: LabelledData, column: str) -> NDArray[np.float32]:
    """Return the numbers of a column, found by the text of each sample."""
    numbers, others = dict[str, float](), dict[str, str]()
    for text, number, place in _numbers_of(recipe, data, column):
        # Cleaning keeps the first of equal texts, without white space around it.
        if numbers.setdefault(text, number) != number:
            others.setdefault(text, place)
    texts = list(map(str, data.train.split.inputs))
    twice = next((text for text, count in Counter(texts).items() if count > 1 and text in others), None)
    if twice is not None:
        raise DataError(
            f"{others[twice]}: {short_repr(twice)} has a different number in column {column!r} of train.curriculum "
            "than in an earlier row, and training reads both rows: give equal texts the same number, or set by to "
            "length"
        ).of("curriculum.two_numbers", "train.curriculum.column")
    return np.array([numbers[text] for text in texts], np.float32)


def _numbers_of(recipe: Recipe, data: LabelledData, column: str) -> Iterator[tuple[str, float, str]]:
    """Yield the text, the number and the place of each row of the sources."""
    from app.data.sources.cells import Column, Columns  # other curricula do not read the source
    from app.data.sources.source import Source
    from app.data.sources.units import read_source

    for config in recipe.data.each_source():
        source = Source(config.source)
        if data.processor.modality != "text" or source.uri.startswith("builtin:"):
            raise RecipeError(
                f"train.curriculum.column is for texts in a table, and {source} is not one: set by to length"
            ).of("curriculum.no_table", "train.curriculum.column")
        named = (
            Column("data.columns.input", config.columns.input, "text"),
            Column("train.curriculum.column", column, "label"),
        )
        for rows in read_source(source, Columns("row", named)):
            texts, cells = (found.to_pylist() for found in rows.cells.values())
            for row, (text, cell) in enumerate(zip(texts, cells, strict=True)):
                yield (text or "").strip(), _number(cell, column, place := rows.place(row)), place


def _number(cell: str, column: str, place: str) -> float:
    if (number := number_of(cell)) is None:
        raise DataError(f"{place}: {cell!r} in column {column!r} of train.curriculum: expected a number").of(
            "number.invalid", "train.curriculum.column"
        )
    return number


def _by_loss(recipe: Recipe, data: LabelledData, model: str, on_progress: ProgressCallback) -> NDArray[np.float32]:
    """Return the cross-entropy of a published model on each sample."""
    from app.training.teacher import TaughtDataset  # it imports an engine

    asked = TaughtDataset.of(data.train, model, open_storage(recipe.storage))
    losses = []
    for start in range(0, len(data.train), _ROWS_AT_ONCE):
        rows = range(start, min(start + _ROWS_AT_ONCE, len(data.train)))
        targets = torch.tensor(data.train.split.take(rows)[1])
        losses.append(functional.cross_entropy(torch.from_numpy(asked.logits(rows)), targets, reduction="none").numpy())
        on_progress()
    return np.concatenate(losses)
