"""What is served: a tiny CNN and a sentence encoder, compiled and published by Rayloom's own jobs' code."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from upath import UPath

from app.compile.compilation import Compilation
from app.compile.publication import publish
from app.compile.subject import Subject, load_subject
from app.compile.variants import wanted_variants
from app.config import load_recipe
from app.repository.manifest import MODEL_FILE, Manifest
from app.repository.repository import Repository
from app.tensors import Tensors
from app.training.weights import RECIPE_FILE
from benchmarks.compile.models import MODELS
from benchmarks.serving.workloads import single_rows

THREADS = 1
"""Of every engine."""

LENGTH = 32
"""Tokens of each row of the encoder's race."""

_NUM_ROWS = 32
_SIZES = "compile.batch_sizes=[1, 2, 4, 8, 16, 32]"
_SAME_FILE = ("compile.precisions=[fp32]", "compile.engines=[onnxruntime]")


@dataclass(frozen=True)
class ServedModel:
    """A published version of a model, and where it came from."""

    name: str
    recipe: str
    storage: UPath
    weights: UPath
    manifest: Manifest

    @property
    def onnx(self) -> Path:
        """The version's file."""
        return Path(str(Repository(self.storage).folder(self.name, self.manifest.version) / MODEL_FILE))

    @property
    def engine(self) -> str:
        """What runs it, such as ``openvino int8``."""
        key = self.manifest.engine_key
        return f"{key.engine} {key.precision}"

    @property
    def blank_row(self) -> Tensors:
        """A row that means nothing."""
        return {
            spec.name: np.ones([1, *(size if size > 0 else LENGTH for size in spec.shape[1:])], spec.dtype)
            for spec in self.manifest.signature.inputs
        }


@dataclass(frozen=True)
class Models:
    """All that is served, with rows of the validation split to ask for."""

    cnn: ServedModel
    encoder: ServedModel
    """The fp32 file on ONNX Runtime."""

    chosen: ServedModel
    """The variant of the encoder that compile chose."""

    pictures: Sequence[Tensors]
    short_texts: Sequence[Tensors]
    """Rows of 32 tokens."""

    texts: Sequence[Tensors]
    """Rows of every length, as often as they occur."""


class Workshop:
    """Makes models in a folder; what was made there before is taken as it is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make(self) -> Models:
        """Train, compile and publish. Raises RayloomError as the parts do."""
        cnn_weights, encoder_weights = self._weights("digits"), self._weights("minilm")
        cnn, encoder = _subject(cnn_weights), _subject(encoder_weights)
        return Models(
            cnn=self._published("digits", "digits", cnn, *_SAME_FILE),
            encoder=self._published("minilm", "minilm-fp32", encoder, *_SAME_FILE),
            chosen=self._published("minilm", "minilm", encoder),
            pictures=_rows(cnn)[:_NUM_ROWS],
            short_texts=[row for row in _rows(encoder) if row["input_ids"].shape[1] == LENGTH][:_NUM_ROWS],
            texts=_spread(_rows(encoder), _NUM_ROWS),
        )

    def _weights(self, name: str) -> UPath:
        note, folder = self._folder / f"{name}-weights.json", self._folder / name
        if not note.exists():
            folder.mkdir(parents=True, exist_ok=True)
            note.write_text(json.dumps(str(MODELS[name].make(MODELS[name], folder))), encoding="utf-8")
        return UPath(json.loads(note.read_text(encoding="utf-8")))

    def _published(self, source: str, name: str, subject: Subject, *overrides: str) -> ServedModel:
        """The version in production; the first is compiled, on one thread."""
        storage = UPath(self._folder / "storage")
        repository = Repository(storage)
        if name not in repository.names():
            recipe = load_recipe(str(subject.weights / RECIPE_FILE), [f"name={name}", _SIZES, *overrides])
            compiled = self._folder / "compiled" / name
            compiled.mkdir(parents=True)
            compilation = Compilation(subject, recipe.compile, wanted_variants(recipe.compile), compiled, print)
            compilation.prove()
            publish(compilation, compilation.choose(), name, repository, UPath(compiled))
        manifest = repository.manifest(name, repository.production(name))
        return ServedModel(name, MODELS[source].recipe_file, storage, subject.weights, manifest)


def _subject(weights: UPath) -> Subject:
    return load_subject(weights, load_recipe(str(weights / RECIPE_FILE)), THREADS)


def _rows(subject: Subject) -> list[Tensors]:
    """Of the validation split, each padded to its own bucket."""
    return [row for batch in subject.reference.inputs for row in single_rows(batch)]


def _spread(rows: Sequence[Tensors], count: int) -> list[Tensors]:
    """So many of them, evenly; mixed, so that lengths alternate."""
    chosen = [rows[int(place)] for place in np.linspace(0, len(rows) - 1, min(count, len(rows)))]
    order = np.random.default_rng(0).permutation(len(chosen))
    return [chosen[place] for place in order]
