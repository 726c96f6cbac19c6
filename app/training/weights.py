"""The weights folder: a trained model with everything that is needed to use it, and checksums."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import nn
from upath import UPath

from app.checksums import verify_checksums, write_checksums
from app.config import Recipe, dump_recipe, load_recipe
from app.data.prepared import PreparedData, load_labels, save_labels
from app.data.processor import Processor
from app.models.factory import build_model
from app.tasks import find_processor

WEIGHTS_FILE = "model.safetensors"
RECIPE_FILE = "recipe.yaml"


@dataclass(frozen=True)
class TrainedModel:
    """A model in evaluation mode, with the recipe, labels and processor that it was trained with."""

    model: nn.Module
    recipe: Recipe
    labels: list[str]
    processor: Processor


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the weights as safetensors, in float32; a tensor that has several names is written once."""
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    tensors = {
        # A copy each: DeepSpeed keeps all parameters in one buffer, which safetensors refuses.
        name: (tensor.float() if tensor.is_floating_point() else tensor)
        .detach()
        .cpu()
        .clone(memory_format=torch.contiguous_format)
        for name, tensor in model.state_dict().items()
        if name in names
    }
    safetensors.torch.save_file(tensors, str(path))


def publish_weights(checkpoint: UPath, data: PreparedData, recipe: Recipe, folder: UPath) -> None:
    """Write the weights folder from a checkpoint; its checksums are written last."""
    folder.mkdir(parents=True, exist_ok=True)
    (checkpoint / WEIGHTS_FILE).copy(folder / WEIGHTS_FILE)
    (folder / RECIPE_FILE).write_text(dump_recipe(recipe), encoding="utf-8")
    save_labels(data.labels, folder)
    data.processor.save(folder)
    write_checksums(folder)


def load_weights(folder: UPath) -> TrainedModel:
    """The model of a weights folder.

    Raises:
        StorageError: the folder is not there, or a file in it was changed.
    """
    verify_checksums(folder)
    with tempfile.TemporaryDirectory(prefix="rayloom-weights-") as temporary:
        local = UPath(temporary) / "weights"
        folder.copy(local)
        recipe = load_recipe(str(local / RECIPE_FILE))
        labels = load_labels(local)
        processor = find_processor(recipe.task).load(local)
        model = build_model(recipe.model, len(labels), processor)
        safetensors.torch.load_model(model, str(local / WEIGHTS_FILE))
    return TrainedModel(model.eval(), recipe, labels, processor)
