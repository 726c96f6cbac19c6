"""A version of a model in memory: its engine, with the processor for natural input and the labels."""

import base64
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.config import TENSORS
from app.data.examples import Input, Natural
from app.data.processor import Processor, WeighingProcessor
from app.data.targets import LABELS_FILE, Classes, Outputs
from app.data.vectors import Vectors
from app.engines.base import Engine
from app.engines.registry import runs_module
from app.errors import EngineError, RequestError, RequestTooLargeError, StorageError
from app.published.engine import open_published, require_known_answers
from app.published.prediction import Prediction
from app.repository.known_answers import KnownAnswers
from app.repository.manifest import Manifest
from app.repository.repository import Repository
from app.storage import to_path
from app.tasks import Encoded, ServedTask, find_served_task
from app.tensors import Tensors, TensorSpec, concat_rows, group_by_shape, is_finite


@dataclass(frozen=True)
class ShapeGroup:
    """The inputs of a request whose tensors have the same shape, as one batch."""

    tensors: Tensors
    indices: list[int]
    """The index of each row in the request."""
    inputs: Sequence[Natural]
    """The natural input of each row."""


@dataclass(frozen=True)
class LoadedModel:
    """An engine with its task, processor and targets, as far as the model has them."""

    manifest: Manifest
    engine: Engine
    task: ServedTask | None
    """None for an imported model that takes tensors only."""

    processor: Processor | None
    targets: Outputs | None
    probe: Tensors | None = None
    """Rows that such a model is probed with. A model with a processor gets rows of ones."""

    @property
    def version(self) -> str:
        """The version, as the protocol writes it."""
        return str(self.manifest.version)

    @property
    def platform(self) -> str:
        """The engine and the type of its file, as the protocol writes them: ``onnxruntime_onnx``, ``tensorrt_plan``."""
        return f"{self.engine.name}_{self.manifest.engine_key.file.rpartition('.')[2]}"

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The input tensors of a request, limited to values that processor, manifest and file all accept."""
        own, of_file = self.manifest.signature.inputs, self.engine.signature.inputs
        limits = defaultdict[str, list[TensorSpec]](list)
        for spec in (*own, *of_file):
            limits[spec.name].append(spec)
        given = self.processor.inputs if self.processor else own
        return tuple(spec.within(*limits[spec.name]) for spec in given)

    @property
    def answers_vectors(self) -> bool:
        """Whether it answers texts with vectors."""
        return isinstance(self.targets, Vectors)

    @property
    def labels(self) -> list[str]:
        """The names of the columns of the output; empty if they have none."""
        return self.targets.labels if self.targets else []

    @cached_property
    def labels_by_output(self) -> dict[str, list[str]]:
        """The names of the classes, by output."""
        return {self.manifest.scores: self.labels} if self.manifest.scores and self.labels else {}

    def encode(self, inputs: Sequence[Natural], go_on: Callable[[], None] = lambda: None) -> list[ShapeGroup]:
        """Return the tensors of natural inputs: texts, images as bytes or in base64, or rows or records as objects.

        Inputs are grouped by shape, so that no text is padded to the length of a longer one.

        Args:
            go_on: called before each input. An error that it raises ends the work.

        Raises:
            RequestError, DataError: there are no inputs, one cannot be read, they would take too long to read, or the
                model takes tensors only.
        """
        processor = self.natural_processor
        if not inputs:
            raise RequestError("inputs is an empty list: give at least one text, image, row or record").of(
                "inputs.none"
            )
        read = [_read(item, processor) for item in inputs]
        _require_light(read, processor, go_on)
        rows = []
        for item in read:
            go_on()
            # Encode each alone, because encoding them together would pad all to the longest.
            rows.append(processor.encode([item]))
        return [
            ShapeGroup(concat_rows([rows[index] for index in indices]), indices, [inputs[index] for index in indices])
            for indices in group_by_shape(rows)
        ]

    @property
    def natural_processor(self) -> Processor:
        """The processor of natural input. Raises RequestError if the model takes tensors only."""
        if self.processor is None or self.manifest.scores is None:
            name = self.manifest.name
            raise RequestError(
                f"model {name!r} was imported without a tokenizer or image transform, or without labels: send tensors "
                f"to /v2/models/{name}/infer, or import it with --processor and --labels"
            ).of("processor.missing")
        return self.processor

    def decode(self, outputs: Tensors, group: ShapeGroup | None = None) -> list[Prediction]:
        """Return what the task answers for each row of the outputs. ``group``: the inputs of these rows."""
        assert self.manifest.scores is not None
        assert self.task is not None
        assert self.targets is not None
        scored = outputs[self.manifest.scores]
        if group is None:
            answers = self.task.answer(scored, self.targets)
        else:
            given = Encoded(group.inputs, group.tensors, self.natural_processor)
            answers = self.task.answer_natural(scored, self.targets, given)
        return [Prediction.model_validate(answer) for answer in answers]

    def warm_up(self, full_batches: Sequence[tuple[int | None, int]]) -> None:
        """Check a row of each length, and batches of some lengths and numbers of rows. Raises as ``check``."""
        for length in self.manifest.engine_key.profile.lengths or (None,):
            self.check(1, length)  # the first call with a shape compiles and allocates
        # Full batches, too, so that memory that is too small fails the deployment, not a later request.
        for length, rows in full_batches:
            self.check(rows, length)

    def check(self, rows: int = 1, length: int | None = None) -> None:
        """Run rows of ones, or of ``probe``.

        Args:
            length: the dynamic size beside the batch; by default the maximum of the processor, or that of ``probe``.

        Raises:
            EngineError: the engine fails, or answers numbers that are not finite, or the task cannot answer them.
            RequestError: it does not take the processor's tensors.
        """
        outputs = self.engine.infer(self._blank(rows, length)) if self.probe is None else self._probed(rows, length)
        for name, output in outputs.items():
            if not is_finite(output):
                raise EngineError(
                    f"model {self.manifest.name!r}, version {self.version}, answers {rows} probe rows with {name!r} "
                    "that is not finite: publish another version"
                ).of("engine.not_finite")
        if self.task and self.targets and self.manifest.scores:
            check_answers(self.task, outputs[self.manifest.scores], self.targets)

    def _blank(self, rows: int, length: int | None) -> Tensors:
        return {
            spec.name: np.full(
                [rows, *(length or spec.max_length or 1 if size == -1 else size for size in spec.shape[1:])],
                0 if spec.values_below == 1 else 1,
                spec.dtype,
            )
            for spec in self.inputs
        }

    def _probed(self, rows: int, length: int | None) -> Tensors:
        """Run rows of ``probe``, repeated. Those of another length than its own are repeated along that axis, too."""
        assert self.probe is not None
        place = self.manifest.signature.length_axis
        known = self.probe[place[0]].shape[place[1]] if place else None
        tensors = dict(self.probe)
        for spec in self.inputs:
            # The rows are known to be valid, which ones or random numbers need not be for such a model.
            tensor = np.take(tensors[spec.name], range(rows), axis=0, mode="wrap")
            # Every dynamic axis of the known length counts, because masks and tokens vary together.
            for axis, size in enumerate(spec.shape[1:], start=1):
                if length and size == -1 and tensor.shape[axis] == known:
                    tensor = np.take(tensor, range(length), axis=axis, mode="wrap")
            tensors[spec.name] = tensor
        return self.engine.run(tensors)


def check_answers(task: ServedTask, outputs: NDArray[np.float32], targets: Outputs) -> None:
    """Have the task answer ``outputs``, so that an error in its code comes before a request does.

    Raises:
        EngineError: the task fails, or its answers are no objects of JSON, one for each row.
    """
    try:
        answers = task.answer(outputs, targets)
        for answer in answers:
            Prediction.model_validate(answer).model_dump_json()
    except Exception as error:  # code of the user's own
        raise EngineError(
            f"task {task.name} cannot answer outputs of shape {outputs.shape} ({type(error).__name__}: {error}): "
            "correct its answer, or the decode of its targets"
        ).of("task.answers") from error
    if len(answers) != len(outputs):
        raise EngineError(
            f"task {task.name} gives {len(answers)} answers for {len(outputs)} rows: expected one for each row"
        ).of("task.answers")


def load_model(
    storage: UPath,
    name: str,
    version: int,
    threads: int,
    full_batches: Sequence[tuple[int | None, int]] = ((None, 1),),
    open_engine: Callable[[Manifest, Path, int], Engine] = open_published,
    exclude: Collection[str] = (),
    seal: str | None = None,
) -> LoadedModel:
    """Fetch and verify a version, load its engine, and warm it up with a row of each length and with full batches.

    Args:
        full_batches: pairs of a length, as for ``LoadedModel.check``, and a number of rows.
        open_engine: opens the engine from the manifest, the folder of the files, and the number of threads.
        exclude: files that ``open_engine`` does not read from that folder.
        seal: the seal of the expected manifest; None accepts any.

    Raises:
        StorageError: the version is missing, was changed, or has another seal.
        EngineError: this machine cannot run it with the same numbers as when it was checked, or they are not finite.
        RequestError: the engine does not take its processor's tensors.
    """
    # The folder lives until the engine is open. After that, everything is in memory or in the machine's cache.
    with tempfile.TemporaryDirectory(prefix="rayloom-model-") as temporary:
        files = to_path(temporary)
        manifest = Repository(storage).fetch(name, version, files, exclude, seal)
        try:
            task = None if manifest.task == TENSORS else find_served_task(manifest.task)
            processor = task.processor.load(files) if task else None
            has_labels = LABELS_FILE in manifest.files
            targets = task.targets.load(files) if task else Classes.load(files) if has_labels else None
            probe = None if processor else KnownAnswers.load(Path(temporary)).inputs
        except FileNotFoundError as error:
            missing = Path(error.filename).name
            raise StorageError(f"model {name!r}, version {version}, has no {missing}: publish it again").of(
                "version.incomplete"
            ) from error
        engine = open_engine(manifest, Path(temporary), threads)
        if runs_module(manifest.engine_key.engine):
            # The code of a module is not part of the version, and may have changed.
            require_known_answers(engine, manifest, Path(temporary))
        model = LoadedModel(manifest, engine, task, processor, targets, probe)
    try:
        model.warm_up(full_batches)
    except BaseException:
        model.engine.close()
        raise
    return model


def _require_light(inputs: Sequence[Input], processor: Processor, go_on: Callable[[], None]) -> None:
    """Raise RequestTooLargeError if inputs would take too long to read, however few bytes they have."""
    if not isinstance(processor, WeighingProcessor):
        return
    weight = 0.0
    for item in inputs:
        go_on()
        weight += processor.weigh(item)
        if weight > 1.0:
            raise RequestTooLargeError(
                f"{len(inputs)} inputs have too many pixels together: send fewer in a request, or scale them down"
            )


def _read(given: Natural, processor: Processor) -> Any:
    if isinstance(given, Mapping) != (processor.modality in ("row", "record")):
        expected = {
            "row": "an object with a value for each column",
            "record": "an object with some of its fields",
            "image": "an image",
            "audio": "a recording",
        }
        raise RequestError(
            f"an input is {'an object' if isinstance(given, Mapping) else 'no object'}: expected "
            f"{expected.get(processor.modality, 'a text')}, which the model takes"
        ).of("input.type")
    if isinstance(given, Mapping):
        return given
    if processor.modality == "text" or isinstance(given, bytes):
        return given
    try:
        return base64.b64decode(given, validate=True)
    except ValueError as error:  # not base64, or not even ASCII
        what, file = ("a recording", "its") if processor.modality == "audio" else ("an image", "a PNG or JPEG")
        raise RequestError(f"{what} is not base64 ({error}): encode the content of {file} file").of(
            "input.not_base64"
        ) from error
