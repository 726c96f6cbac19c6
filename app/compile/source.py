"""What is compiled: a model with rows of its data, and the answers with which every file and variant is compared."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.artifacts import DATA, WEIGHTS
from app.checksums import code_revision, sha256_of, verify_checksums
from app.compile.quantization.finetune import Rounding
from app.compile.reference import BATCH, Reference, chunks
from app.config import Int8FinetuneConfig, Precision, Recipe
from app.data.prepared import Dataset, PreparedData
from app.engines.base import Engine, EngineSettings, ShapeProfile, Signature
from app.errors import CompileError, StorageError
from app.repository.manifest import Lineage, Split
from app.repository.score import Score
from app.tasks import Task
from app.tasks.judgement import spread
from app.telemetry.judgement import Judgement
from app.tensors import Tensors

CALIBRATION_BATCH, CALIBRATION_SAMPLES = 16, 512


@dataclass(frozen=True)
class Source(ABC):
    """A model to compile: trained by Rayloom (``SourceModel``), or elsewhere (``ImportedSource``)."""

    threads: int
    """Cores of this machine, which the engines use."""

    score_to_keep: Score | None
    """Score of the model, from which the gates count its drop. None if the rows have no labels."""

    reference: Reference
    """The right answers on the rows that variants are compared on."""

    split: ClassVar[Split] = "validation"
    """The name of the rows that variants are compared on."""

    @property
    @abstractmethod
    def signature(self) -> Signature:
        """The model's inputs and outputs."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """The size of the weights in memory."""

    @property
    @abstractmethod
    def task(self) -> str:
        """The task of the published version."""

    @property
    def baseline(self) -> str:
        """What gave the right answers, in reports."""
        return "PyTorch"

    @property
    def scores(self) -> str | None:
        """The output that ``predict`` answers by; None if the model takes and gives tensors only."""
        return self.reference.judge.output

    @property
    def sparse(self) -> bool:
        """Whether the model was pruned to 2-of-4 sparsity."""
        return False

    @abstractmethod
    def export(self, path: Path, precision: Precision, shard_mb: int) -> None:
        """Write an ONNX file in this precision, with more MiB of weights than ``shard_mb`` in shards beside it.

        Raises CompileError.
        """

    @abstractmethod
    def open_module(self, settings: EngineSettings) -> Engine:
        """Open the model itself in PyTorch. Raises EngineError."""

    @abstractmethod
    def module_files(self) -> dict[str, UPath]:
        """Return the files that a version for PyTorch has, by name."""

    @abstractmethod
    def pruned(self) -> "Source":
        """Return the model pruned to 2-of-4 sparsity, with the score to keep of this one. Raises CompileError."""

    @abstractmethod
    def calibration_batches(self, count: int | None) -> Iterable[Tensors]:
        """Return batches of ``count`` rows for int8's ranges. They can be iterated again. Raises CompileError."""

    @abstractmethod
    def write_finetuned(
        self, roundings: Mapping[str, Rounding], path: Path, config: Int8FinetuneConfig, log: Callable[[str], None]
    ) -> None:
        """Train the model with these roundings, and write it in float32. Raises CompileError if it cannot be trained.

        The model itself stays as it is, because the other variants and all gates are measured by it.
        """

    @abstractmethod
    def load_test(self) -> Dataset | None:
        """Read the test split; None if there is none. Only for the published accuracy, never to choose a variant."""

    def judge(self, name: str, answers: Reference) -> Judgement | None:  # noqa: ARG002
        """Judge the answers on the split of this name. None: there is nothing to compare them with."""
        return None

    @abstractmethod
    def save_codec(self, folder: UPath) -> None:
        """Write the processor's files and the labels, as far as the model has them."""

    @abstractmethod
    def lineage(self, compile_run: str) -> Lineage:
        """Return where the model came from."""

    @property
    def sample(self) -> Tensors:
        """A batch of at least two real rows, for the export."""
        first = next(self.reference.rows.batches()).inputs
        # ``torch.export`` would fix the batch size if it were 1.
        return resized(first, max(2, _num_rows(first)))

    @cached_property
    def shares(self) -> dict[int | None, float]:
        """The share of the rows by padded length. The only key is None if all inputs have one size."""
        rows = self.reference.rows
        counts = zip(self.rows_by_length, map(len, rows.groups), strict=True)
        return {length: count / len(rows) for length, count in counts}

    @cached_property
    def rows_by_length(self) -> dict[int | None, Tensors]:
        """One batch of real rows for each padded length."""
        rows = self.reference.rows
        firsts = (rows.split.batch(group[:BATCH]).inputs for group in rows.groups)
        return {_length_of(batch, self.signature): batch for batch in firsts}

    def profile(self, batch_sizes: Sequence[int]) -> ShapeProfile:
        """Return the sizes that TensorRT plans are built for: batch sizes, measured lengths and the maximum length."""
        lengths = {length for length in self.shares if length is not None}
        # A request may be longer than any measured row.
        lengths |= {spec.max_length for spec in self.signature.inputs if spec.max_length is not None}
        return ShapeProfile(batch_sizes=tuple(sorted(batch_sizes)), lengths=tuple(sorted(lengths)))


def resized(rows: Tensors, size: int) -> Tensors:
    """Return ``size`` rows: the first of ``rows``, repeated if there are too few."""
    return {name: np.resize(array, (size, *array.shape[1:])) for name, array in rows.items()}


def calibration_indices(
    available: int, count: int | None, lengths: NDArray[np.int64] | Sequence[int]
) -> list[Sequence[int]]:
    """Return batches of indices from all over ``available`` rows, sorted by length. By default, 512 or all."""
    # Rows of similar lengths need little padding in a batch.
    ordered = sorted(spread(available, count or CALIBRATION_SAMPLES), key=lambda index: int(lengths[index]))
    return list(chunks(ordered, CALIBRATION_BATCH))


def _length_of(batch: Tensors, signature: Signature) -> int | None:
    """Return the batch's padded length; None if inputs have one size."""
    if (place := signature.length_axis) is None:
        return None
    name, axis = place
    return int(batch[name].shape[axis])


def _num_rows(batch: Tensors) -> int:
    return len(next(iter(batch.values())))


def require_same_task(trained: Recipe, recipe: Recipe, weights: UPath) -> None:
    """Raise CompileError unless the weights were trained for the same task as the recipe to compile."""
    if trained.task != recipe.task:
        raise CompileError(
            f"the weights {str(weights)!r} are of task {trained.task}, the recipe {recipe.name!r} is of {recipe.task}: "
            "give weights of this recipe"
        ).of("weights.other_task")


def prepared_data(weights: UPath, recipe: Recipe, task: Task) -> PreparedData:
    """Return the data of the run that has trained a weights folder, without the test split.

    Raises:
        StorageError: they are not beside the weights, or were changed.
    """
    folder = weights.parent / DATA
    # A folder that was copied elsewhere has lost the data by which it is judged.
    if weights.name != WEIGHTS or not folder.exists():
        raise StorageError(
            f"{str(weights)!r} has no prepared data beside it: give the {WEIGHTS} folder inside a train run's folder"
        ).of("data.missing")
    verify_checksums(folder)
    return task.load(recipe, folder)


def trained_lineage(recipe: Recipe, weights: UPath, data: PreparedData, compile_run: str) -> Lineage:
    """Return where a model that Rayloom trained came from."""
    return Lineage(
        train_run=str(weights.parent),
        trial=str(recipe.tuned_from) if recipe.tuned_from else None,
        teacher=recipe.train.teacher.model if recipe.train.teacher else None,
        pretrained=recipe.model.origin,
        compile_run=compile_run,
        recipe=sha256_of(recipe.model_dump_json().encode()),
        data_fingerprint=data.fingerprint,
        code=code_revision(),
    )
