"""A model that Rayloom trained, as it is compiled: its weights, its data, and PyTorch's answers."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from upath import UPath

from app.artifacts import ARCHITECTURE_FILE, DATA, RECIPE_FILE, WEIGHTS_FILE
from app.compile.export import export_onnx, trace
from app.compile.quantization.finetune import Rounding, train_rounded
from app.compile.reference import EncodedBatches, Judge, Reference, Rows, chunks
from app.compile.source import Source, calibration_indices, prepared_data, require_same_task, trained_lineage
from app.config import Int8FinetuneConfig, Precision, Recipe
from app.data.prepared import Dataset, PreparedData
from app.engines.base import Engine, EngineSettings, Signature
from app.engines.torch import TorchEngine, require_device
from app.errors import CompileError
from app.models.precision import converted_copy
from app.models.sparsity import prune_2_to_4
from app.published.loaded import check_answers
from app.published.weights import TrainedModel, load_weights
from app.repository.manifest import Lineage
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

    def export(self, path: Path, precision: Precision, shard_mb: int) -> None:
        export_onnx(self.trained.model, self.signature.inputs, self.sample, path, precision, shard_mb)

    def open_module(self, settings: EngineSettings) -> Engine:
        require_device(settings.device)
        # On the CPU the engine leaves the model as it is. A GPU gets a copy.
        on_cpu = settings.device == "cpu"
        model = self.trained.model if on_cpu else converted_copy(self.trained.model, lambda tensor: tensor.cuda())
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
        judge = self.trained.task.judge(self.trained.recipe, self.data)
        if judge is None or answers.score is None:
            return None
        return judge.judge(name, answers.rows.split, answers.score.value, answers.predictions)

    def require_samples(self, count: int | None) -> None:
        """Raise CompileError if the training split has fewer than ``count`` samples."""
        available = len(self.data.train)
        if count is not None and count > available:
            raise CompileError(
                f"compile.calibration.samples is {count}, and the training split has {available}: ask for fewer, give "
                "more data, or leave int8 and fp8 out of compile.precisions"
            ).of("calibration.too_many", "compile.calibration.samples")

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
        return trained_lineage(self.trained.recipe, self.weights, self.data, compile_run)


def load_source_model(weights: UPath, recipe: Recipe, threads: int) -> SourceModel:
    """Load a weights folder and the prepared data beside it, and run PyTorch over the validation split.

    Raises:
        StorageError: a folder is missing, or one of its files was changed.
        CompileError: the weights are of another task, or the model takes other inputs than its processor makes.
        EngineError: the task cannot answer the model's outputs.
    """
    # A large model and an engine of it would not fit into memory together.
    trained = load_weights(weights, max_bytes=recipe.compile.shard_mb * 2**20)
    require_same_task(trained.recipe, recipe, weights)
    _check_inputs(trained, weights)
    data = prepared_data(weights, trained.recipe, trained.task)
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
        ).of("model.other_inputs", "model.factory") from error
