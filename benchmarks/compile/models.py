"""What is compiled: models that Rayloom trains, one that was trained elsewhere, and one with fresh weights."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch
from torch import nn
from upath import UPath

from app.artifacts import DATA, RECIPE_FILE, WEIGHTS, WEIGHTS_FILE
from app.checksums import write_checksums
from app.config import Recipe, dump_recipe, load_recipe
from app.data.labelled import LabelledData
from app.data.targets import Classes
from app.engines.architecture import usable_cores
from app.errors import TrainingError
from app.models.factory import build_model
from app.runs import Result
from app.storage import to_path
from app.tasks import prepare
from benchmarks.compile import minilm
from benchmarks.compile.samples import write_pictures, write_sentences
from benchmarks.launch import python

_HERE = Path(__file__).parent
_IMAGENET_LABELS = 1000


@dataclass(frozen=True)
class Setting:
    """A shape that is timed."""

    batch_size: int
    length: int | None = None
    """Length of the rows in tokens; None for images."""

    def __str__(self) -> str:
        return f"batch {self.batch_size}" + (f", {self.length} tokens" if self.length else "")


@dataclass(frozen=True)
class Model:
    """A recipe, and how the benchmark comes by weights of it."""

    name: str
    recipe_file: str
    make: Callable[["Model", Path], UPath]
    """Writes a weights folder with its data beside it, below the folder that is given."""
    lengths: tuple[int | None, ...] = (None,)
    overrides: tuple[str, ...] = ()
    has_accuracy: bool = True
    """Its labels are what it was trained to answer."""
    batch_sizes: tuple[int, ...] = (1, 8)

    @property
    def settings(self) -> list[Setting]:
        """The settings to time."""
        return [Setting(size, length) for length in self.lengths for size in self.batch_sizes]


def train(model: Model, folder: Path) -> UPath:
    """Train with all cores, as users do without a cluster: ``python -m app.training RECIPE KEY=VALUE…``.

    Raises:
        TrainingError: Rayloom refuses; its reason is in the message.
    """
    try:
        said = python(
            "app.training",
            model.recipe_file,
            *model.overrides,
            f"storage={folder / 'storage'}",
            OMP_NUM_THREADS=str(usable_cores()),
        )
    except RuntimeError as error:
        if reasons := re.findall("^error: (.+)", str(error), re.MULTILINE):
            raise TrainingError(reasons[-1]) from error
        raise
    return to_path(Result.of_output(said).artifacts["weights"])


def take_sentence_encoder(model: Model, folder: Path) -> UPath:
    """The encoder of the package."""
    write_sentences(source := folder / "sentences.jsonl")
    recipe = load_recipe(
        model.recipe_file, [f"data.source={source}", f"storage={folder / 'storage'}", *model.overrides]
    )
    return write_weights(recipe, minilm.WIDTH, minilm.load_pretrained, folder)


def take_fresh_resnet(model: Model, folder: Path) -> UPath:
    """Fresh weights, the same each time."""
    write_pictures(source := folder / "pictures")
    recipe = load_recipe(
        model.recipe_file, [f"data.source={source}", f"storage={folder / 'storage'}", *model.overrides]
    )
    return write_weights(recipe, _IMAGENET_LABELS, leave_fresh, folder)


def leave_fresh(model: nn.Module) -> None:
    """Keep the weights that the factory gave."""


def write_weights(recipe: Recipe, answers: int, fill: Callable[[nn.Module], None], folder: Path) -> UPath:
    """Write the weights folder of a model that was not trained here, as training would.

    Args:
        answers: the numbers that the model answers to a row.
        fill: gives the model its weights.
    """
    data = prepare(recipe)
    assert isinstance(data, LabelledData)
    data = replace(data, targets=Classes([str(number) for number in range(answers)]))
    torch.manual_seed(0)
    model = build_model(recipe.model, data.facts)
    fill(model)
    data.save(to_path(folder / DATA))
    weights = to_path(folder / WEIGHTS)
    data.save_codec(weights)
    safetensors.torch.save_model(model, str(weights / WEIGHTS_FILE))
    (weights / RECIPE_FILE).write_text(dump_recipe(recipe), encoding="utf-8")
    write_checksums(weights)
    return weights


_SHORT = ("train.workers=1", "train.early_stopping=null")

MODELS = {
    model.name: model
    for model in (
        Model("digits", "recipes/digits.yaml", train, overrides=(*_SHORT, "train.epochs=12")),
        Model(
            "reviews",
            "recipes/reviews.yaml",
            train,
            lengths=(32, 128),
            overrides=(*_SHORT, "train.epochs=2", "train.linear_baseline=false"),
        ),
        Model("fashion", "recipes/fashion.yaml", train, overrides=(*_SHORT, "train.epochs=2")),
        Model("resnet50", str(_HERE / "resnet50.yaml"), take_fresh_resnet, has_accuracy=False),
        Model("minilm", str(_HERE / "minilm.yaml"), take_sentence_encoder, lengths=(32, 128), has_accuracy=False),
    )
}
