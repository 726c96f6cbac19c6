"""A version of a model in memory, with what it takes to answer a person."""

import base64
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.data.classification import load_labels
from app.data.examples import Input
from app.data.processor import Processor
from app.engines.base import Engine
from app.engines.registry import runs_module
from app.errors import EngineError, RequestError, StorageError
from app.repository.manifest import Manifest
from app.repository.repository import Repository
from app.serving.model.engine import open_published, require_known_answers
from app.serving.protocol.natural import Prediction
from app.storage import to_path
from app.tasks import find_processor
from app.tensors import Tensors, concat_rows, group_by_shape


@dataclass(frozen=True)
class ShapeGroup:
    """The tensors of those inputs of a request whose tensors have one shape."""

    tensors: Tensors
    places: list[int]
    """In the request, of each row."""


@dataclass(frozen=True)
class LoadedModel:
    """An engine with the processor before it and the labels after it."""

    manifest: Manifest
    engine: Engine
    processor: Processor
    labels: list[str]

    @property
    def version(self) -> str:
        """The version, as the protocol writes it."""
        return str(self.manifest.version)

    @property
    def platform(self) -> str:
        """What runs which kind of file, as the protocol writes it: ``onnxruntime_onnx``, ``tensorrt_plan``."""
        return f"{self.engine.name}_{self.manifest.engine_key.file.rpartition('.')[2]}"

    def encode(self, inputs: Sequence[Input]) -> list[ShapeGroup]:
        """Tensors of natural inputs: texts, or images as bytes or in base64.

        A text is not padded to the length of a longer one.

        Raises:
            RequestError, DataError: there are none, or one cannot be read.
        """
        if not inputs:
            raise RequestError("inputs is an empty list: give one text or image at least")
        rows = [self.processor.encode([self._read(each)]) for each in inputs]
        return [ShapeGroup(concat_rows([rows[place] for place in alike]), alike) for alike in group_by_shape(rows)]

    def _read(self, given: Input) -> Input:
        if self.processor.modality == "text" or isinstance(given, bytes):
            return given
        try:
            return base64.b64decode(given, validate=True)
        except ValueError as error:  # not base64, or not even ASCII
            raise RequestError(f"an image is not base64 ({error}): encode the content of a PNG or JPEG file") from error

    def decode(self, logits: NDArray[np.float32]) -> list[Prediction]:
        """Labels and probabilities from logits of shape (batch, labels)."""
        return [
            Prediction(
                label=self.labels[int(row.argmax())],
                scores={label: round(float(score), 6) for label, score in zip(self.labels, row, strict=True)},
            )
            for row in _softmax(logits)
        ]

    def check(self, rows: int = 1, length: int | None = None) -> None:
        """Run rows of ones.

        Args:
            length: of the sizes that vary beside the batch; left out, the longest that the processor makes.

        Raises:
            EngineError: the engine fails, or answers numbers that are not finite.
            RequestError: it does not take what the processor makes.
        """
        blank = {
            spec.name: np.ones(
                [rows, *(length or spec.max_length or 1 if size == -1 else size for size in spec.shape[1:])], spec.dtype
            )
            for spec in self.processor.inputs
        }
        for name, output in self.engine.infer(blank).items():
            if not np.isfinite(output).all():
                raise EngineError(
                    f"model {self.manifest.name!r}, version {self.version}, answers {rows} rows of ones with {name!r} "
                    "that is not finite: publish another version"
                )


def load_model(
    storage: UPath,
    name: str,
    version: int,
    threads: int,
    full_batches: Sequence[tuple[int | None, int]] = ((None, 1),),
    open_engine: Callable[[Manifest, Path, int], Engine] = open_published,
    exclude: Collection[str] = (),
) -> LoadedModel:
    """Fetch and verify a version, load its engine, and warm it up with a row of each length and with full batches.

    Args:
        full_batches: pairs of a length, as ``LoadedModel.check`` takes it, and its rows.
        open_engine: of the manifest, the folder of the files, and threads.
        exclude: files that it does not read from that folder.

    Raises:
        StorageError: the version is not there or was changed.
        EngineError: this machine cannot run it with the numbers that were judged, or it answers no finite ones.
        RequestError: it does not take what its processor makes.
    """
    with tempfile.TemporaryDirectory(prefix="rayloom-model-") as temporary:
        files = to_path(temporary)
        manifest = Repository(storage).fetch(name, version, files, exclude)
        try:
            processor, labels = find_processor(manifest.task).load(files), load_labels(files)
        except FileNotFoundError as error:
            missing = Path(error.filename).name
            raise StorageError(f"model {name!r}, version {version}, has no {missing}: publish it again") from error
        engine = open_engine(manifest, Path(temporary), threads)
        if runs_module(manifest.engine_key.engine):  # by code that is not in the version
            require_known_answers(engine, manifest, Path(temporary))
        model = LoadedModel(manifest, engine, processor, labels)
    try:
        for length in manifest.engine_key.profile.lengths or (None,):
            model.check(1, length)  # the first call with a shape compiles and allocates
        for length, rows in full_batches:
            model.check(rows, length)
    except BaseException:
        model.engine.close()
        raise
    return model


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Over the last axis. SciPy's takes 0.1 s to import, when every replica starts."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)  # type: ignore[no-any-return]
