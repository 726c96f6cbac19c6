"""Goods: samples of several fields that tests train on."""

import io
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.config import DataConfig, Recipe
from app.data.examples import Input, Modality
from app.data.images import encode_png
from app.tensors import Tensors, TensorSpec

FIELDS = {
    "title": {"kind": "text"},
    "note": {"kind": "text", "column": "remark"},
    "photo": {"kind": "image", "column": "file"},
    "size": {"kind": "row", "columns": ["width", "colour"]},
}
ENCODERS = {
    "title": {"factory": "app.models.text:encoder_classifier", "args": {"layers": 1, "width": 8, "heads": 2}},
    "note": {"factory": "app.models.text:encoder_classifier", "args": {"layers": 1, "width": 8, "heads": 2}},
    "photo": {"factory": "app.models.image:small_cnn", "args": {"width": 8, "poolings": 1}},
    "size": {"factory": "app.models.tabular:mlp", "args": {"width": 8, "layers": 1, "embedding": 2}},
}
LINES = [
    "a small shoe,it is {0} words long and goes on for a while,{0}.png,{0},red,shoe",
    "a bag {0},,{0}.png,,,bag",
    ",,{0}.png,{0},blue,bag",
    "shoe {0} alone,,,,,shoe",
]
ROWS = 48


def recipe_of(table: Path, fields: Any = None, **model: Any) -> Recipe:
    data = {
        "source": str(table),
        "columns": {"fields": FIELDS if fields is None else fields},
        "image": {"size": 6, "channels": 1},
        "buckets": [4, 8, 16],
        "validation_fraction": 0.25,
    }
    given = {"factory": "app.models.multimodal:late_fusion", "args": {"width": 8, "encoders": ENCODERS, **model}}
    train = {"global_batch_size": 4, "epochs": 2}
    tree = {"name": "goods", "task": "multimodal-classification", "data": data, "model": given, "train": train}
    return Recipe.model_validate(tree)


def with_data(recipe: Recipe, **data: Any) -> Recipe:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=data)})


def write_goods(folder: Path) -> Path:
    """Write a csv of goods, each with some of four fields, and its pictures beside it."""
    generator = np.random.default_rng(0)
    lines = ["title,remark,file,width,colour,label"]
    for number in range(ROWS):
        (folder / f"{number}.png").write_bytes(encode_png(generator.integers(0, 255, (6, 6), np.uint8)))
        lines.append(LINES[number % len(LINES)].format(number))
    (folder / "goods.csv").write_text("\n".join(lines), encoding="utf-8")
    return folder / "goods.csv"


class Loudness:
    """A field of one's own: the mean level of each eighth of a recording, as float32 of shape (rows, 8)."""

    modality: ClassVar[Modality] = "image"  # read from files, as pictures are
    inputs = (TensorSpec("levels", np.dtype(np.float32), (-1, 8)),)
    facts: ClassVar[dict[str, int]] = {"num_levels": 8}

    @classmethod
    def fit(cls, inputs: Sequence[Input], config: DataConfig) -> Self:
        return cls()

    def encode(self, inputs: Sequence[Input]) -> Tensors:
        return {"levels": np.stack([self._levels(item) for item in inputs])}

    def _levels(self, item: Input) -> NDArray[np.float32]:
        assert isinstance(item, bytes)
        with wave.open(io.BytesIO(item)) as recording:
            samples = np.frombuffer(recording.readframes(recording.getnframes()), np.int16)
        return np.abs(samples.reshape(8, -1).astype(np.float32)).mean(axis=1) / 2**15

    def save(self, folder: UPath) -> None:
        (folder / "loudness.json").write_text("{}")

    @classmethod
    def load(cls, folder: UPath) -> Self:
        assert (folder / "loudness.json").exists()
        return cls()


class Waveform(Loudness):
    """The samples of a recording, of any length."""

    inputs = (TensorSpec("samples", np.dtype(np.float32), (-1, -1), max_length=500),)
