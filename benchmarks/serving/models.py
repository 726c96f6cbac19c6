"""What is served: a tiny CNN and a sentence encoder, each compiled and published by ``jobs.compile``."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from upath import UPath

from app.artifacts import DATA, RECIPE_FILE
from app.config import load_recipe
from app.data.labelled import LabelledData
from app.data.targets import Classes
from app.repository.manifest import MODEL_FILE, Manifest
from app.repository.repository import Repository
from app.storage import to_path
from app.tasks import find_served_task
from app.tensors import Tensors
from benchmarks.compile.models import MODELS
from benchmarks.launch import python

THREADS = 1
"""Of every engine."""

LENGTH = 32
"""Tokens of each row of the encoder's race."""

_NUM_ROWS = 32
_FOR_THROUGHPUT = ("compile.objective={goal: max_throughput}", "compile.batch_sizes=[1, 4, 8, 16, 32]")
_SAME_FILE = (*_FOR_THROUGHPUT, "compile.precisions=[fp32]", "compile.engines=[onnxruntime]")
_ANY_VARIANT = (*_FOR_THROUGHPUT, "compile.precisions=[fp32, bf16, int8]")


@dataclass(frozen=True)
class ServedModel:
    """A published version of a model, and where it came from."""

    recipe: str
    storage: UPath
    weights: UPath
    manifest: Manifest

    @property
    def name(self) -> str:
        """In storage and at the endpoint."""
        return self.manifest.name

    @property
    def onnx(self) -> Path:
        """The version's file."""
        return Path(str(Repository(self.storage).folder(self.name, self.manifest.version) / MODEL_FILE))

    @property
    def blank_row(self) -> Tensors:
        """A row that means nothing."""
        return {
            spec.name: np.ones([1, *(size if size > 0 else LENGTH for size in spec.shape[1:])], spec.dtype)
            for spec in self.manifest.signature.inputs
        }


class Models:
    """All that is served, with rows of the validation split to ask for.

    Each is trained and compiled when it is first asked for; what is in the folder from another time is taken as it is.

    Raises:
        RayloomError: the CNN cannot be trained, or the encoder's weights are not installed.
        RuntimeError: app.compile fails; with what it printed.
    """

    def __init__(self, folder: Path) -> None:
        """In a folder, whose path is absolute."""
        self._folder = folder

    @cached_property
    def cnn(self) -> ServedModel:
        """The fp32 file on ONNX Runtime, as the peers run it."""
        return self._published("digits", "digits", _SAME_FILE)

    @cached_property
    def encoder(self) -> ServedModel:
        """Likewise."""
        return self._published("minilm", "minilm-fp32", _SAME_FILE)

    @cached_property
    def chosen(self) -> ServedModel:
        """The variant of the encoder that compile chose."""
        return self._published("minilm", "minilm", _ANY_VARIANT)

    @cached_property
    def pictures(self) -> list[Tensors]:
        """Rows for the CNN."""
        return _rows(self._weights("digits"))[:_NUM_ROWS]

    @cached_property
    def texts(self) -> list[Tensors]:
        """Rows of every length, as often as they occur; mixed, so that lengths alternate."""
        rows = sorted(_rows(self._weights("minilm")), key=lambda row: row["input_ids"].shape[1])
        places = np.linspace(0, len(rows) - 1, _NUM_ROWS, dtype=int)
        return [rows[place] for place in np.random.default_rng(0).permutation(places)]

    @cached_property
    def short_texts(self) -> list[Tensors]:
        """Rows of 32 tokens."""
        return [row for row in _rows(self._weights("minilm")) if length_of(row) == LENGTH][:_NUM_ROWS]

    def _weights(self, source: str) -> UPath:
        note, own = self._folder / f"{source}-weights.json", self._folder / source
        if not note.exists():
            own.mkdir(parents=True, exist_ok=True)
            note.write_text(json.dumps(str(MODELS[source].make(MODELS[source], own))), encoding="utf-8")
        return to_path(json.loads(note.read_text(encoding="utf-8")))

    def _published(self, source: str, name: str, overrides: Sequence[str]) -> ServedModel:
        """The version in production; the first is compiled as a user would, on a core for each thread of an engine."""
        weights, storage = self._weights(source), to_path(self._folder / "storage")
        repository = Repository(storage)
        if name not in repository.names():
            print(f"{name}: compiling", flush=True)
            fixed = (f"name={name}", f"storage={storage}", f"compile.weights={weights}")
            with _cores(THREADS):
                python("app.compile", str(weights / RECIPE_FILE), *fixed, *overrides)
        manifest = repository.manifest(name, repository.production(name))
        print(f"{name}: {manifest.engine_key}; {manifest.serving}", flush=True)
        return ServedModel(MODELS[source].recipe_file, storage, weights, manifest)


@contextlib.contextmanager
def _cores(count: int) -> Iterator[None]:
    """Limit the processes that are started in the block to ``count`` cores."""
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(usable)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, usable)


def _rows(weights: UPath) -> list[Tensors]:
    """Return the rows of the validation split, each padded to its own bucket."""
    processor = find_served_task(load_recipe(str(weights / RECIPE_FILE)).task).processor
    validation = LabelledData.load(weights.parent / DATA, processor, Classes).validation
    return [validation.batch([number]).inputs for number in range(len(validation))]


def length_of(row: Tensors) -> int | None:
    """Return the number of tokens of a row; None for a picture."""
    return int(row["input_ids"].shape[1]) if "input_ids" in row else None
