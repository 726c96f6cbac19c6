"""Distillation: a published model, the teacher, gives its logits for each batch, and training learns them, too.

Hinton, Vinyals, Dean 2015, "Distilling the Knowledge in a Neural Network", arXiv:1503.02531.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from upath import UPath

from app.config import Recipe
from app.data.examples import Input
from app.data.labelled import LabelledData, LabelledDataset
from app.data.prepared import Batch, PreparedData
from app.data.targets import LABELS_FILE, Classes, load_labels
from app.errors import RecipeError
from app.published.loaded import LoadedModel, load_model
from app.repository.repository import Repository
from app.storage import open_storage
from app.tasks import find_served_task

_MAX_KEPT_BYTES = 2**28
"""Bytes of logits that a process keeps, of 268,435 rows with 250 labels, say."""


def kept_rows(rows: int, labels: int) -> int:
    """Return the number of rows, from the first on, whose logits a process keeps."""
    return min(rows, _MAX_KEPT_BYTES // (4 * labels))


def with_resolved_teacher(recipe: Recipe, data: PreparedData, storage: UPath) -> Recipe:
    """Return the recipe with the number of its teacher's version, once it is known to suit the data. Say so.

    Raises:
        StorageError: there is no such model or version.
        RecipeError: the teacher takes other inputs or has other labels than the data, or gives several for a row.
    """
    teacher = recipe.train.teacher
    assert teacher is not None
    assert isinstance(data, LabelledData)  # recipes of other tasks are refused
    title = require_classifier(teacher.model, "train.teacher.model", data, storage)
    if recipe.train.plan.pipeline > 1:
        raise RecipeError("train.teacher is only for plans without a pipeline: set train.plan.pipeline to 1").of(
            "pipeline.teacher", "train.plan.pipeline"
        )
    rows, kept = len(data.train), kept_rows(len(data.train), len(data.labels))
    again = f"; it runs again on {rows - kept:,} of {rows:,} rows in each epoch" if kept < rows else ""
    print(f"teacher {title}: gives its logits for each batch{again}", flush=True)
    return recipe.with_published("teacher", title)


def require_classifier(model: str, key: str, data: LabelledData, storage: UPath) -> str:
    """Return NAME/VERSION of a published model that classifies samples like the data's.

    Raises:
        StorageError: there is no such model or version.
        RecipeError: it has other inputs or labels than the data, or gives a row several. The message names ``key``.
    """
    repository = Repository(storage)
    name, _, number = model.partition("/")
    manifest = repository.manifest(name, int(number) if number else repository.production(name))
    title = f"{name}/{manifest.version}"
    if manifest.scores is None or LABELS_FILE not in manifest.files:
        raise RecipeError(f"{key} {title} has no labels: import it with --labels, or name another").of(
            "teacher.no_labels", key
        )
    task = find_served_task(manifest.task)
    if not issubclass(task.targets, Classes):
        raise RecipeError(
            f"{key} {title} is of task {manifest.task}, which does not give one label to each row: name "
            "a model that does"
        ).of("teacher.labels")
    labels = load_labels(repository.folder(name, manifest.version))
    # Their order may differ. ``TaughtDataset`` reorders the logits.
    if sorted(labels) != sorted(data.labels):
        raise RecipeError(
            f"{key} {title} has the labels {', '.join(labels)}, the data {', '.join(data.labels)}: name "
            "a model that was trained on data like these"
        ).of("teacher.labels")
    if (given := task.processor.modality) != data.processor.modality:
        raise RecipeError(f"{key} {title} takes {given}s, the data holds {data.processor.modality}s").of(
            "teacher.inputs", key
        )
    return title


def taught(data: PreparedData, recipe: Recipe) -> PreparedData:
    """Return the data whose training batches have the teacher's logits."""
    teacher = recipe.train.teacher
    assert teacher is not None
    assert isinstance(data, LabelledData)
    return replace(data, train=TaughtDataset.of(data.train, teacher.model, open_storage(recipe.storage)))


@dataclass(frozen=True)
class TaughtDataset(LabelledDataset):
    """A split with the teacher's logits. The teacher runs on a row when a batch first has it.

    Its logits are kept for later epochs, as far as ``kept_rows`` goes.

    Each process that reads batches has a teacher of its own, because engines do not survive a fork.
    """

    model: str
    """The teacher, as NAME or NAME/VERSION."""

    storage: UPath

    @classmethod
    def of(cls, given: LabelledDataset, model: str, storage: UPath) -> Self:
        """Return the samples of a split, with what has been measured of them."""
        taught = cls(given.split, given.processor, given.targets, model, storage)
        vars(taught).update(vars(given))
        return taught

    @property
    def labels(self) -> Sequence[str]:
        """The labels of the data."""
        return self.targets.labels

    @cached_property
    def _logits(self) -> NDArray[np.float32]:
        """Of each row that is kept."""
        return np.empty((kept_rows(len(self), len(self.labels)), len(self.labels)), np.float32)

    @cached_property
    def _is_known(self) -> NDArray[np.bool_]:
        """Whether they are there, of each row of the split."""
        return np.zeros(len(self), np.bool_)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the samples of ``indices`` with the teacher's logits. Raises as ``LabelledDataset.batch``."""
        return replace(super().batch(indices), taught=self.logits(indices))

    def logits(self, indices: Sequence[int]) -> NDArray[np.float32]:
        """Return the teacher's logits, of shape (samples, labels)."""
        rows = np.array(indices, np.int64)
        known = self._is_known[rows]
        found = np.empty((len(rows), len(self.labels)), np.float32)
        found[known] = self._logits[rows[known]]
        if not known.all():
            new = rows[~known]
            asked = self._ask(self.split.take(new.tolist())[0])
            found[~known] = asked
            kept = new < len(self._logits)
            self._logits[new[kept]] = asked[kept]
            self._is_known[new[kept]] = True
        return found

    def _ask(self, inputs: Sequence[Input]) -> NDArray[np.float32]:
        """Return the teacher's logits, of shape (rows, labels), with the labels in the order of the data."""
        model = self._teacher
        scores, size = model.manifest.scores, model.manifest.serving.max_batch_size
        assert scores is not None
        # The engine was measured, and perhaps built, for batches of at most this size.
        parts = [inputs[first : first + size] for first in range(0, len(inputs), size)]
        logits = [model.engine.run(model.natural_processor.encode(part))[scores] for part in parts]
        return np.concatenate(logits)[:, [model.labels.index(label) for label in self.labels]]

    @cached_property
    def _teacher(self) -> LoadedModel:
        name, _, number = self.model.partition("/")
        # A recipe that was resolved names the number, so production may change while a run trains.
        version = int(number) if number else Repository(self.storage).production(name)
        return load_model(self.storage, name, version, torch.get_num_threads())
