"""A model that Rayloom trained, as it is compiled: its weights, its data, and PyTorch's answers."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from upath import UPath

from app.artifacts import ARCHITECTURE_FILE, DATA, RECIPE_FILE, WEIGHTS, WEIGHTS_FILE
from app.checksums import code_revision, sha256_of, verify_checksums
from app.compile.export import export_onnx, trace
from app.compile.quantization.finetune import Rounding, train_rounded
from app.compile.reference import EncodedBatches, Judge, Reference, Rows, chunks
from app.compile.source import Source, calibration_indices
from app.config import Int8FinetuneConfig, Precision, Recipe
from app.data.labelled import CollatingTargets, LabelledDataset
from app.data.prepared import Dataset, PreparedData
from app.engines.base import Engine, EngineSettings, Signature
from app.engines.torch import TorchEngine
from app.errors import CompileError, StorageError
from app.models.sparsity import prune_2_to_4
from app.published.loaded import check_answers
from app.published.weights import TrainedModel, load_weights
from app.repository.manifest import Lineage
from app.tasks.judgement import Judge as RecipeJudge
from app.telemetry.judgement import Judgement
from app.tensors import OUTPUT, Tensors

_ANSWERED_ROWS = 4


@dataclass(frozen=True)
class SourceModel(Source):
    """A model that Rayloom trained, with its data. ``reference`` has PyTorch's answers on the validation split.

    ``score_to_keep`` is the validation score before pruning.
    """

    trained: TrainedModel
    weights: UPath
    data: PreparedData
    is_pruned: bool = False

    @property
    def signature(self) -> Signature:
        return _signature_of(self.trained)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.trained.model.state_dict().values())

    @property
    def task(self) -> str:
        return self.trained.recipe.task

    @property
    def sparse(self) -> bool:
        return self.is_pruned

    def export(self, path: Path, precision: Precision) -> None:
        export_onnx(self.trained.model, self.signature.inputs, self.sample, path, precision)

    def open_module(self, settings: EngineSettings) -> Engine:
        model = copy.deepcopy(self.trained.model)  # the engine moves it to its device
        return TorchEngine(model, self.signature, settings)

    def module_files(self) -> dict[str, UPath]:
        """Return the weights, and the recipe from which the model is built again."""
        files = {name: self.weights / name for name in (WEIGHTS_FILE, RECIPE_FILE, ARCHITECTURE_FILE)}
        return {name: file for name, file in files.items() if file.exists()}

    def write_finetuned(
        self, roundings: Mapping[str, Rounding], path: Path, config: Int8FinetuneConfig, log: Callable[[str], None]
    ) -> None:
        model, specs = copy.deepcopy(self.trained.model), self.signature.inputs
        rows = Rows.of(self.data.train, self.signature)

        def batches(epoch: int) -> Iterator[Tensors]:
            """Return the inputs of an epoch in a seeded order, in batches of one padded length."""
            order = np.random.default_rng(epoch)
            shuffled = (order.permutation(np.asarray(group)) for group in rows.groups)
            every = [part for group in shuffled for part in chunks(group.tolist(), config.batch_size)]
            # A program that was traced with several rows may not take one.
            kept = (every[index] for index in order.permutation(len(every)) if len(every[index]) > 1)
            return (rows.split.batch(indices).inputs for indices in kept)

        program = trace(model, specs, self.sample)
        state = train_rounded(program, roundings, self.trained.model, batches, config, log)
        # Only parameters were trained. Buffers stay as they are.
        model.load_state_dict(state, strict=False)
        export_onnx(model, specs, self.sample, path)

    def pruned(self) -> "SourceModel":
        trained = replace(self.trained, model=prune_2_to_4(self.trained.model))
        sparse = _evaluated(trained, self.weights, self.data, self.threads)
        # The gates count the loss of pruning, too, so the score is that before pruning.
        return replace(sparse, score_to_keep=self.score_to_keep, is_pruned=True)

    def load_test(self) -> Dataset | None:
        return self.trained.task.load_test(self.trained.recipe, self.weights.parent / DATA)

    def judge(self, name: str, answers: Reference) -> Judgement | None:
        split, train = answers.rows.split, self.data.train
        if not isinstance(split, LabelledDataset) or not isinstance(train, LabelledDataset):
            return None
        if isinstance(split.targets, CollatingTargets) or answers.score is None:
            return None
        judge = RecipeJudge.of(self.trained.recipe, self.trained.task, train)
        return judge.judge(name, split, answers.score.value, answers.predictions) if judge else None

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
        return EncodedBatches(train, calibration_indices(len(train), count, train.lengths))

    def save_codec(self, folder: UPath) -> None:
        self.trained.processor.save(folder)
        self.trained.targets.save(folder)
        if (configuration := self.weights / ARCHITECTURE_FILE).exists():
            configuration.copy(folder / ARCHITECTURE_FILE)

    def lineage(self, compile_run: str) -> Lineage:
        recipe = self.trained.recipe
        return Lineage(
            train_run=str(self.weights.parent),
            trial=str(recipe.tuned_from) if recipe.tuned_from else None,
            teacher=recipe.train.teacher.model if recipe.train.teacher else None,
            pretrained=recipe.model.origin,
            compile_run=compile_run,
            recipe=sha256_of(recipe.model_dump_json().encode()),
            data_fingerprint=self.data.fingerprint,
            code=code_revision(),
        )


def load_source_model(weights: UPath, recipe: Recipe, threads: int) -> SourceModel:
    """Load a weights folder and the prepared data beside it, and run PyTorch over the validation split.

    Raises:
        StorageError: a folder is missing, or one of its files was changed.
        CompileError: the weights are of another task, or the model takes other inputs than its processor makes.
        EngineError: the task cannot answer the model's outputs.
    """
    trained = load_weights(weights)
    if trained.recipe.task != recipe.task:
        raise CompileError(
            f"the weights {str(weights)!r} are of task {trained.recipe.task}, the recipe {recipe.name!r} is of "
            f"{recipe.task}: give weights of this recipe"
        )
    _check_inputs(trained, weights)
    data = _prepared_data(weights, trained)
    source_model = _evaluated(trained, weights, data, threads)
    # An error in the task's own code is found before anything is measured.
    _, outputs = next(source_model.reference.batches(_ANSWERED_ROWS))
    check_answers(trained.task, outputs[OUTPUT], trained.targets)
    return source_model


def _evaluated(trained: TrainedModel, weights: UPath, data: PreparedData, threads: int) -> SourceModel:
    engine = TorchEngine(trained.model, _signature_of(trained), EngineSettings(threads=threads))
    reference = Reference.of(engine, data.validation, Judge(trained.task.gate_of(trained.targets)))
    return SourceModel(threads, reference.score, reference, trained, weights, data)


def _signature_of(trained: TrainedModel) -> Signature:
    return Signature(trained.processor.inputs, (trained.task.output(trained.targets),))


def _check_inputs(trained: TrainedModel, weights: UPath) -> None:
    given = [spec.name for spec in trained.processor.inputs]
    try:
        # By names alone, because a call would need rows.
        inspect.signature(trained.model.forward).bind(**dict.fromkeys(given))
    except TypeError as error:
        raise CompileError(
            f"the model in {str(weights)!r}, {type(trained.model).__name__}, does not take its processor's outputs "
            f"{', '.join(given)}: {error}; change model.factory or task"
        ) from error


def _prepared_data(weights: UPath, trained: TrainedModel) -> PreparedData:
    folder = weights.parent / DATA
    # A folder that was copied elsewhere has lost the data by which it is judged.
    if weights.name != WEIGHTS or not folder.exists():
        raise StorageError(
            f"{str(weights)!r} has no prepared data beside it: give the {WEIGHTS} folder inside a train run's folder"
        )
    verify_checksums(folder)
    return trained.task.load(trained.recipe, folder)
