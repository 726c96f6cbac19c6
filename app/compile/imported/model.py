"""A model that was trained elsewhere, as an ONNX file with what is known of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from app.best_effort import warn
from app.checksums import sha256_of_file
from app.compile.imported.onnx_file import (
    external_files,
    is_rounded,
    probabilities,
    read_onnx,
    take_over,
    values_below,
    with_sizes,
)
from app.compile.imported.padding import choose_padding_side, require_same_inputs
from app.config import BUILT_IN_TASKS
from app.data.processor import Processor
from app.data.targets import Classes, LabelSets, Numbers, Scale, Targets
from app.data.text import SEGMENTS, TextProcessor
from app.engines.architecture import usable_cores
from app.engines.base import Engine, EngineSettings, Signature
from app.engines.onnxruntime import OnnxRuntimeEngine, open_oracle
from app.errors import CompileError, EngineError
from app.repository.manifest import MODEL_FILE, ImportedFrom
from app.tasks import ServedTask, find_served_task
from app.tensors import Tensor

OpenReference = Callable[[int], Engine]
"""Opens the engine whose answers are right, with so many threads."""

Head = Literal["classification", "multilabel", "regression"]
"""What a row is answered with: one of the labels, any number of them, or a number. It is the end of a task's name."""

MAX_INFLUENCE = 0.05
"""The largest relative difference of outputs that other rows may cause.

Dynamic int8 uses one range for a whole batch, which causes up to 2 %. A sequence-first LSTM differs by over 10 %.
"""
_MAX_INFLUENCE_OF_PADDING = 1e-4
"""The same limit for padding in float32, where another order of sums causes less than 1e-5."""

_MIN_SHARE_OF_IDS = 0.9
"""The smallest share of a model's embeddings that its own tokenizer uses. Tables are padded to fast sizes."""


@dataclass(frozen=True)
class ImportedModel:
    """An ONNX file that was checked, and the engine whose answers are right."""

    source: ImportedFrom
    onnx: Path
    """In a folder of its own, with its shards if it is large."""

    signature: Signature
    open_reference: OpenReference
    labels: tuple[str, ...] = ()
    scores: str | None = None
    """The output whose columns are the labels, or which is a number for each row."""

    probabilities: Mapping[str, str] = field(default_factory=dict)
    """The outputs that are no logits any more, each with the operator that made it."""

    head: Head = "classification"
    is_rounded: bool = False
    """Whether the file computes in another type than float32, so that its numbers depend a little on other rows."""

    processor: Processor | None = None
    """Turns texts or images into the inputs."""

    lengths: tuple[int, ...] = ()
    """The lengths to which the processor pads texts."""

    @property
    def targets(self) -> Targets | None:
        """What the scores mean; None without labels."""
        if self.head == "regression":
            return Numbers(Scale())
        if not self.labels:
            return None
        return (LabelSets if self.head == "multilabel" else Classes)(list(self.labels))

    @property
    def task(self) -> ServedTask | None:
        """The task that answers texts or images; None if the model takes tensors only."""
        if self.processor is None or self.targets is None:
            return None
        return find_served_task(f"{self.processor.modality}-{self.head}")

    def answering(self, processor: Processor, lengths: Sequence[int], folder: str) -> "ImportedModel":
        """Return the model with a processor, which was read from ``folder``.

        Raises:
            CompileError: the model takes other tensors than the processor makes, or its scores are no logits.
        """
        if self.targets and (maker := self.probabilities.get(self.scores or "")):
            raise CompileError(
                f"output {self.scores!r} is made by {maker}, and predict makes probabilities "
                "of logits itself: export the model without it, or name its logits with --scores"
            ).of("scores.probabilities", "--scores")
        if self.processor is not None:
            require_same_inputs(self.processor, processor, folder)
        if isinstance(processor, TextProcessor) and any(spec.name == SEGMENTS for spec in self.signature.inputs):
            processor = processor.changed(has_segments=True)
        # Outputs are left out: only what the processor makes has to fit.
        if difference := Signature(self.signature.inputs, ()).difference(Signature(processor.inputs, ())):
            raise CompileError(f"the model {difference}, which the processor of {folder!r} makes: give its own").of(
                "processor.other_tensors"
            )
        if (name := f"{processor.modality}-{self.head}") not in BUILT_IN_TASKS:
            warn(f"there is no task {name}, so the model will not answer {processor.modality}s: send it tensors")
            return self
        if isinstance(processor, TextProcessor) and self.scores:
            processor = self._fitted(processor, folder)
        return replace(self, processor=processor, lengths=tuple(lengths))

    def _fitted(self, processor: TextProcessor, folder: str) -> TextProcessor:
        """Return the tokenizer, which pads as the model needs it. Raises CompileError if it does not fit the model."""
        known = next(spec for spec in self.signature.inputs if spec.name == "input_ids")
        count = processor.facts["vocab_size"]
        if known.values_below is not None and count > known.values_below:
            raise CompileError(
                f"the tokenizer of {folder!r} has ids up to {count - 1}, and the model has embeddings for "
                f"{known.values_below}: give the model's own tokenizer"
            ).of("tokenizer.too_large")
        if known.values_below is not None and count < _MIN_SHARE_OF_IDS * known.values_below:
            warn(
                f"the tokenizer of {folder!r} has {count} ids, and the model has embeddings for {known.values_below}: "
                "is it the model's own?"
            )
        if known.max_length is not None and processor.facts["max_length"] > known.max_length:
            raise CompileError(
                f"the tokenizer of {folder!r} makes up to {processor.facts['max_length']} tokens, and the model has "
                f"positions for {known.max_length}: give the model's own tokenizer, or lower its model_max_length"
            ).of("tokenizer.too_long")
        limit = MAX_INFLUENCE if self.is_rounded else _MAX_INFLUENCE_OF_PADDING
        assert self.scores is not None  # a model that answers texts has them
        return choose_padding_side(processor, self.open_reference(usable_cores()), self.scores, folder, limit)

    def labelled(self, labels: Sequence[str], scores: str | None) -> "ImportedModel":
        """Return the model with labels, if there are any, and with the output that has a column for each.

        Raises:
            CompileError: no output, or more than one, can have the scores; or it has another number of columns; or a
                label is blank or there twice.
        """
        for number, label in enumerate(labels, start=1):
            if not label.strip() or labels.index(label) + 1 != number:
                fault = f"is {label!r}, as number {labels.index(label) + 1}" if label.strip() else "is blank"
                raise CompileError(
                    f"label {number} of {len(labels)} {fault}: expected a name of its own for each column of the scores"
                ).of("labels.blank_or_repeated")
        # Scores are floats with the rows first. Only sets of labels may have a single one.
        columns = {
            spec.name: spec.shape[1]
            for spec in self.signature.outputs
            if spec.dtype.kind == "f" and len(spec.shape) == 2 and (spec.shape[1] != 1 or self.head == "multilabel")
        }
        fitting = [name for name, size in columns.items() if size in (-1, len(labels)) or not labels]
        if scores is None:
            if len(fitting) != 1:
                outputs = ", ".join(str(Tensor.of(spec)) for spec in self.signature.outputs)
                advice = "name the right one with --scores" if fitting else "give a label for each column with --labels"
                raise CompileError(
                    f"{len(fitting)} of the outputs {outputs} can have a score for each of {len(labels) or 'the'} "
                    f"labels: {advice}"
                ).of("scores.undecided", "--scores" if fitting else "--labels")
            (scores,) = fitting
        if scores not in fitting:
            columns_of = f", which has {columns[scores]} columns," if scores in columns else ""
            raise CompileError(
                f"output {scores!r}{columns_of} cannot have the scores: expected a float output with a column for each "
                f"of {len(labels) or 'the'} labels; name another with --scores, or give all labels with --labels"
            ).of("scores.unfit", "--scores")
        return replace(self, labels=tuple(labels), scores=scores)


def lines_of(text: str) -> list[str]:
    """Return the labels of a file with one a line. Unlike ``splitlines``, it cuts at no other character."""
    return text.removesuffix("\n").split("\n")


def import_onnx(
    path: Path,
    folder: Path,
    source: ImportedFrom,
    open_reference: OpenReference | None = None,
    max_length: int | None = None,
) -> ImportedModel:
    """Check an ONNX file, and write it into ``folder``.

    Args:
        source: where it came from. The sums of the file are added, unless it has some.
        open_reference: by default, ONNX Runtime on this file gives the right answers.
        max_length: limit of the sizes that vary, other than the rows, if it is known.

    Raises:
        CompileError: the file cannot be imported, and why.
        EngineError: ONNX Runtime cannot load it.
    """
    model = read_onnx(path)
    target = folder / "imported" / MODEL_FILE
    target.parent.mkdir()
    take_over(path, target)
    try:
        engine = open_oracle(target, 1)
    except EngineError as error:
        message = str(error).replace(str(target), str(path))  # name the file that the user gave
        raise EngineError(message).of(error.rule, error.key) from error
    named, limits = with_sizes(engine.signature, model, path), values_below(model)
    engine.close()
    inputs = (
        replace(
            spec,
            max_length=max_length if len(spec.shape) > 1 and -1 in spec.shape[1:] else None,
            values_below=limits.get(spec.name),
        )
        for spec in named.inputs
    )
    beside, own = path.parent.resolve(), {path.name: sha256_of_file(path)}
    sums = own | {str(file.relative_to(beside)): sha256_of_file(file) for file in external_files(model, path)}
    return ImportedModel(
        source if source.files else source.model_copy(update={"files": sums}),
        target,
        Signature(tuple(inputs), named.outputs),
        # As it is served: in a file that is quantized already, ONNX Runtime fuses nodes, which changes numbers.
        open_reference or (lambda threads: OnnxRuntimeEngine(target, EngineSettings(threads=threads))),
        probabilities=probabilities(model),
        is_rounded=is_rounded(model),
    )
