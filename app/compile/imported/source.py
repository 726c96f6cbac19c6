"""An imported model as it is compiled: its ONNX file, its rows, and the right answers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from upath import UPath

from app.checksums import code_revision, sha256_of
from app.compile.imported.model import MAX_INFLUENCE, Head, ImportedModel
from app.compile.imported.natural import fingerprint_of, read_natural, select
from app.compile.imported.samples import TensorRows, random_rows, read_rows, varying_sizes
from app.compile.onnx_files import copy_onnx, save_onnx, size_of
from app.compile.quantization.finetune import Rounding
from app.compile.reference import EncodedBatches, Judge, Reference, Rows
from app.compile.source import CALIBRATION_BATCH, CALIBRATION_SAMPLES, Source
from app.config import TENSORS, Int8FinetuneConfig, Precision, Recipe
from app.data.labelled import LabelledDataset
from app.data.prepared import Dataset
from app.engines.base import Engine, EngineSettings, Signature
from app.errors import CompileError, DataError, EngineError, RecipeError
from app.repository.manifest import Lineage, Split
from app.tasks.judgement import spread
from app.tasks.metrics import Accuracy, Metric
from app.tensors import Tensors, concat_rows, is_finite, slice_rows

AnyRows = TypeVar("AnyRows", TensorRows, LabelledDataset)

_RANDOM_ROWS = 64
_DEFAULT_SIZE = 64
_LARGE = 1000
_LARGE_DTYPES = (np.float32, np.float64)
_MIN_ROWS_FOR_INT8 = 64
"""A quarter of the rows is for int8's ranges, and no fewer than 16 are enough for them."""

_ANSWERS: dict[Head, str] = {"multilabel": "any number of labels", "regression": "a number"}


@dataclass(frozen=True)
class ImportRows:
    """The rows of an imported model: those that variants are compared on, and those that give int8 its ranges."""

    compared: Dataset
    calibration: TensorRows | LabelledDataset | None
    """None: int8 is not made, because the rows are random or too few."""

    fingerprint: str
    metric: Metric | None
    """What judges the answers; None if the rows have no labels."""

    source: str | None
    """The file they came from; None if they are random."""

    @property
    def kind(self) -> str:
        """Whose rows they are, in a word."""
        return "given" if self.source else "random"


@dataclass(frozen=True)
class ImportedSource(Source):
    """A model that was trained elsewhere. ``reference`` has the answers of ONNX Runtime or PyTorch in float32."""

    model: ImportedModel
    recipe: Recipe
    rows: ImportRows

    split: ClassVar[Split] = "samples"

    @property
    def signature(self) -> Signature:
        return self.model.signature

    @property
    def size_bytes(self) -> int:
        return size_of(self.model.onnx)

    @property
    def task(self) -> str:
        return self.model.task.name if self.model.task else TENSORS

    @property
    def baseline(self) -> str:
        return self.lineage("").baseline

    @property
    def scores(self) -> str | None:
        return self.model.scores if self.model.targets else None

    def export(self, path: Path, precision: Precision, shard_mb: int) -> None:
        if precision != "fp32":
            raise CompileError(
                f"an imported model keeps the types of its file, so there is no {precision} file: leave it out of "
                "compile.precisions, or import a file in it"
            ).of("precision.unsupported", "compile.precisions")
        if self.size_bytes > shard_mb * 2**20:
            save_onnx(ir.load(self.model.onnx), path, shard_mb)
        else:
            # Unchanged, so its checksum stays that of the file that was given.
            copy_onnx(self.model.onnx, path)

    def open_module(self, settings: EngineSettings) -> Engine:  # noqa: ARG002
        raise EngineError("an imported model has no recipe from which PyTorch could build it: name another engine").of(
            "torch.no_code"
        )

    def module_files(self) -> dict[str, UPath]:
        return {}

    def pruned(self) -> "ImportedSource":
        raise CompileError(
            "compile.sparsity prunes models that Rayloom has trained: leave it out, or prune before export"
        ).of("sparsity.unsupported", "compile.sparsity")

    def write_finetuned(
        self,
        roundings: Mapping[str, Rounding],  # noqa: ARG002
        path: Path,  # noqa: ARG002
        config: Int8FinetuneConfig,  # noqa: ARG002
        log: Callable[[str], None],  # noqa: ARG002
    ) -> None:
        raise CompileError("compile.int8.finetune trains models that Rayloom has trained: leave it out").of(
            "finetune.unsupported", "compile.int8.finetune"
        )

    def load_test(self) -> Dataset | None:
        return None

    def calibration_batches(self, count: int | None) -> EncodedBatches:
        rows = self.rows.calibration
        assert rows is not None  # precisions that need it were left out
        if count is not None and count > len(rows):
            raise CompileError(
                f"compile.calibration.samples is {count}, and a quarter of --samples are {len(rows)} rows: ask for "
                "fewer, or give more rows"
            ).of("calibration.too_many", "compile.calibration.samples")
        # Tensors are not padded, so a batch has rows of one length.
        by_length, chosen = Rows.of(rows, self.signature), set(spread(len(rows), count or CALIBRATION_SAMPLES))
        parts = ([index for index in group if index in chosen] for group in by_length.groups)
        return EncodedBatches(
            rows, [indices for part in parts for indices in by_length.chunks(part, CALIBRATION_BATCH)]
        )

    def save_codec(self, folder: UPath) -> None:
        if self.task != TENSORS and self.model.processor:
            self.model.processor.save(folder)
        if self.model.targets:
            self.model.targets.save(folder)

    def lineage(self, compile_run: str) -> Lineage:
        return Lineage(
            imported=self.model.source.model_copy(update={"samples": self.rows.source}),
            compile_run=compile_run,
            recipe=sha256_of(self.recipe.model_dump_json().encode()),
            data_fingerprint=self.rows.fingerprint,
            code=code_revision(),
        )


def own_rows(path: Path, model: ImportedModel) -> ImportRows:
    """Read a person's rows. If there are enough, a quarter is for int8's ranges. Raises DataError.

    A model that answers texts or images takes them, another one tensors.
    """
    if model.task and model.targets and model.processor:
        natural = read_natural(path, model.processor, model.targets)
        metric = model.task.gate_of(model.targets)
        return _split(natural, partial(select, natural), fingerprint_of(natural), metric, path)
    rows = read_rows(path, model.signature, model.labels)
    if rows.classes is not None and model.head != "classification":
        raise DataError(
            f"{str(path)!r} has a class for each row, and the model answers {_ANSWERS[model.head]}: leave them out, or "
            "give texts or images with --processor"
        ).of("classes.unexpected")
    return _split(rows, rows.select, rows.fingerprint, None if rows.classes is None else Accuracy(), path)


def _split(
    rows: AnyRows, choose: Callable[[Sequence[int]], AnyRows], fingerprint: str, metric: Metric | None, path: Path
) -> ImportRows:
    if len(rows) < _MIN_ROWS_FOR_INT8:
        return ImportRows(rows, None, fingerprint, metric, str(path))
    # In rows whose classes take turns, every fourth could have the same.
    order = np.random.default_rng(0).permutation(len(rows))
    held_out, compared = (sorted(part.tolist()) for part in np.split(order, [(len(rows) + 3) // 4]))
    return ImportRows(choose(compared), choose(held_out), fingerprint, metric, str(path))


def made_up_rows(model: ImportedModel, sizes: Mapping[str, Sequence[int]]) -> ImportRows:
    """Return random rows in the range of the model.

    Raises:
        RecipeError: ``sizes`` names one that does not vary.
    """
    # A size that is fixed in the file, or misspelled, would be ignored silently.
    names = varying_sizes(model.signature)
    if unknown := [name for name in sizes if name not in names]:
        raise RecipeError(
            f"--size names {unknown[0]!r}: the sizes that vary are {', '.join(names) or 'none but the rows'}"
        ).of("size.unknown", "--size")
    chosen = {name: sizes.get(name, model.lengths or [_DEFAULT_SIZE]) for name in names}
    rows = random_rows(model.signature, chosen, _RANDOM_ROWS)
    return ImportRows(rows, None, rows.fingerprint, None, None)


def imported_source(model: ImportedModel, rows: ImportRows, recipe: Recipe, threads: int) -> ImportedSource:
    """Run the reference over the rows.

    Raises:
        CompileError: the model cannot run them, its outputs do not have a row for each, or none can have the scores.
    """
    # Without classes there is nothing to score.
    scores = (model.scores or model.labelled((), None).scores) if rows.metric else None
    with closing(model.open_reference(threads)) as engine:
        try:
            _check_outputs(engine, rows)
            judge = Judge(rows.metric, scores) if scores else Judge(None)
            reference = Reference.of(engine, rows.compared, judge)
            # After the run, because a file may not say how many columns the scores have.
            _check_classes(reference, rows)
        except EngineError as error:
            raise CompileError(
                f"the model cannot run {rows.source or 'random rows'}: {error}; give rows of your own with --samples, "
                "or the sizes that it takes with --size NAME=N"
            ).of("model.cannot_run") from error
    return ImportedSource(threads, reference.score, reference, model, recipe, rows)


def _check_classes(reference: Reference, rows: ImportRows) -> None:
    """Raise CompileError if a row has a class for which the scores have no column."""
    if reference.judge.metric is None or not isinstance(rows.compared, TensorRows) or rows.compared.classes is None:
        return
    output = reference.judge.output
    columns, highest = reference.outputs[0][output].shape[-1], rows.compared.classes.max()
    if highest >= columns:
        raise CompileError(
            f"{rows.source!r} has the class {highest}, and the output {output!r} has {columns} columns: "
            f"expected classes from 0 to {columns - 1}"
        ).of("class.range")


def _check_outputs(engine: Engine, rows: ImportRows) -> None:
    """Raise CompileError if outputs are not one for each row, not finite, or not those of each row alone."""
    # Two rows show whether one influences the other.
    count = 1 if engine.signature.takes_one_row else 2
    indices = max(Rows.of(rows.compared, engine.signature).groups, key=len)[:count]
    inputs = rows.compared.batch(indices).inputs
    outputs = engine.run(inputs)
    for name, output in outputs.items():
        if output.shape[:1] != (len(indices),):
            raise CompileError(
                f"output {name!r} has shape {list(output.shape)} for {len(indices)} rows: expected the rows first; "
                "export it that way"
            ).of("rows.not_first")
        if not is_finite(output):
            raise CompileError(f"output {name!r} is not finite on the first rows: give others with --samples").of(
                "output.not_finite"
            )
    alone = concat_rows([engine.run(slice_rows(inputs, row, row + 1)) for row in range(len(indices))])
    for name, output in outputs.items():
        if not _is_same(alone[name], output):
            raise CompileError(
                f"output {name!r} of a row depends on the other rows of its batch, so clients would change each "
                "other's answers: export it with the batch first or with a batch size of 1; if it is quantized, use "
                "fixed ranges"
            ).of("rows.dependent")
    _check_large_row(engine, inputs, alone)


def _check_large_row(engine: Engine, inputs: Tensors, alone: Tensors) -> None:
    """Raise CompileError if large numbers in a row change another's answers, as with one int8 range for a batch."""
    if engine.signature.takes_one_row or not any(tensor.dtype in _LARGE_DTYPES for tensor in inputs.values()):
        return
    beside = {
        name: np.concatenate([tensor[:1], _LARGE * tensor[:1]]) if tensor.dtype in _LARGE_DTYPES else tensor[[0, 0]]
        for name, tensor in inputs.items()
    }
    with suppress(EngineError):  # the model does not accept numbers this large
        for name, output in engine.run(beside).items():
            if not _is_same(alone[name][:1], output[:1]):
                raise CompileError(
                    f"output {name!r} of a row depends on the numbers of other rows, as with one int8 range for a "
                    "whole batch, so clients would change each other's answers: quantize the file with fixed ranges, "
                    "or export it with a batch size of 1"
                ).of("rows.dependent")


def _is_same(alone: NDArray[Any], together: NDArray[Any]) -> bool:
    if alone.shape != together.shape:
        return False
    if together.dtype.kind != "f":
        return bool(np.mean(alone != together) <= MAX_INFLUENCE)
    # By norm, because kernels for other batch sizes add in another order, and elements near 0 vary most.
    difference = np.linalg.norm(alone.astype(np.float64) - together)
    return bool(difference <= MAX_INFLUENCE * np.linalg.norm(together.astype(np.float64)))
