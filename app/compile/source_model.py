"""The model to compile, its data, and PyTorch's answers, with which every file and variant is compared."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from upath import UPath

from app.artifacts import DATA, WEIGHTS
from app.checksums import verify_checksums
from app.compile.reference import BATCH, EncodedBatches, Reference, chunks
from app.compile.sparsity import prune_2_to_4
from app.config import Recipe
from app.data.classification import ClassificationData, LabelledDataset, load_test
from app.engines.base import EngineSettings, ShapeProfile, Signature
from app.engines.torch import TorchEngine
from app.errors import CompileError, StorageError
from app.tensors import OUTPUT, Tensors, TensorSpec
from app.training.weights import TrainedModel, load_weights

_CALIBRATION_BATCH = 16
_CALIBRATION_SAMPLES = 512


@dataclass(frozen=True)
class SourceModel:
    """A trained model with its prepared data."""

    trained: TrainedModel
    weights: UPath
    data: ClassificationData
    threads: int
    """Cores of this machine, which PyTorch and the engines use."""

    accuracy_to_keep: float
    """Validation accuracy of the model before pruning, from which the gates count the accuracy drop."""

    reference: Reference
    """PyTorch's answers of ``trained`` on the validation split."""

    sparse: bool = False
    """Whether ``trained`` was pruned to 2:4 sparsity."""

    @property
    def signature(self) -> Signature:
        """The model's inputs and outputs."""
        return _signature_of(self.trained)

    @property
    def size_bytes(self) -> int:
        """The size of the weights in memory."""
        return sum(tensor.nbytes for tensor in self.trained.model.state_dict().values())

    @property
    def sample(self) -> Tensors:
        """A batch of at least two real rows, for the export."""
        first = next(self.reference.rows.batches()).inputs
        return resized(first, max(2, _num_rows(first)))

    @cached_property
    def shares(self) -> dict[int | None, float]:
        """The share of validation rows by padded length. The only key is None if all inputs have one size."""
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
        lengths |= {spec.max_length for spec in self.signature.inputs if spec.max_length is not None}
        return ShapeProfile(batch_sizes=tuple(sorted(batch_sizes)), lengths=tuple(sorted(lengths)))

    def load_test(self) -> LabelledDataset | None:
        """Read the test split; None if there is none. Only for the published accuracy, never to choose a variant."""
        return load_test(self.weights.parent / DATA, self.data.processor)

    def require_samples(self, count: int | None) -> None:
        """Raise CompileError if the training split has fewer than ``count`` samples."""
        available = len(self.data.train)
        if count is not None and count > available:
            raise CompileError(
                f"compile.calibration.samples is {count}, and the training split has {available}: ask for fewer, give "
                "more data, or leave int8 and fp8 out of compile.precisions"
            )

    def calibration_batches(self, count: int | None) -> EncodedBatches:
        """Return ``count`` samples from all over the training split, sorted by length. Raises CompileError."""
        self.require_samples(count)
        train = self.data.train
        chosen = np.linspace(0, len(train) - 1, min(count or _CALIBRATION_SAMPLES, len(train)), dtype=int)
        lengths = train.lengths
        ordered = sorted(chosen.tolist(), key=lambda index: lengths[index])
        return EncodedBatches(train, list(chunks(ordered, _CALIBRATION_BATCH)))


def resized(rows: Tensors, size: int) -> Tensors:
    """Return ``size`` rows: the first of ``rows``, repeated if there are too few."""
    return {name: np.resize(array, (size, *array.shape[1:])) for name, array in rows.items()}


def pruned(whole: SourceModel) -> SourceModel:
    """Return the model pruned to 2:4 sparsity. Gates compare it with the accuracy of the whole model."""
    trained = replace(whole.trained, model=prune_2_to_4(whole.trained.model))
    sparse = _evaluated(trained, whole.weights, whole.data, whole.threads)
    return replace(sparse, accuracy_to_keep=whole.accuracy_to_keep, sparse=True)


def load_source_model(weights: UPath, recipe: Recipe, threads: int) -> SourceModel:
    """Load a weights folder and the prepared data beside it, and run PyTorch over the validation split.

    Raises:
        StorageError: a folder is missing, or one of its files was changed.
        CompileError: the weights are of another task, or the model takes other inputs than its processor makes.
    """
    trained = load_weights(weights)
    if trained.recipe.task != recipe.task:
        raise CompileError(
            f"the weights {str(weights)!r} are of task {trained.recipe.task}, the recipe {recipe.name!r} is of "
            f"{recipe.task}: give weights of this recipe"
        )
    _check_inputs(trained, weights)
    data = _prepared_data(weights, trained)
    return _evaluated(trained, weights, data, threads)


def _evaluated(trained: TrainedModel, weights: UPath, data: ClassificationData, threads: int) -> SourceModel:
    engine = TorchEngine(trained.model, _signature_of(trained), EngineSettings(threads=threads))
    reference = Reference.of(engine, data.validation)
    return SourceModel(trained, weights, data, threads, reference.accuracy, reference)


def _signature_of(trained: TrainedModel) -> Signature:
    return Signature(trained.processor.inputs, (TensorSpec(OUTPUT, np.dtype(np.float32), (-1, len(trained.labels))),))


def _length_of(batch: Tensors, signature: Signature) -> int | None:
    """Return the batch's padded length; None if inputs have one size."""
    if (place := signature.length_axis) is None:
        return None
    name, axis = place
    return int(batch[name].shape[axis])


def _num_rows(batch: Tensors) -> int:
    return len(next(iter(batch.values())))


def _check_inputs(trained: TrainedModel, weights: UPath) -> None:
    given = [spec.name for spec in trained.processor.inputs]
    try:
        inspect.signature(trained.model.forward).bind(**dict.fromkeys(given))
    except TypeError as error:
        raise CompileError(
            f"the model in {str(weights)!r}, {type(trained.model).__name__}, does not take its processor's outputs "
            f"{', '.join(given)}: {error}; change model.factory or task"
        ) from error


def _prepared_data(weights: UPath, trained: TrainedModel) -> ClassificationData:
    folder = weights.parent / DATA
    if weights.name != WEIGHTS or not folder.exists():
        raise StorageError(
            f"{str(weights)!r} has no prepared data beside it: give the {WEIGHTS} folder inside a train run's folder"
        )
    verify_checksums(folder)
    return ClassificationData.load(folder, type(trained.processor))
