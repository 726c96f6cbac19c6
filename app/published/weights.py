"""The weights folder: a trained model, everything that is needed to use it, and checksums."""

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import nn
from upath import UPath

from app.artifacts import RECIPE_FILE, WEIGHTS_FILE
from app.checksums import verify_checksums, write_checksums
from app.config import Recipe, dump_recipe, load_stored_recipe
from app.data.prepared import PreparedData
from app.data.processor import Processor
from app.data.targets import Outputs
from app.data.tokenizer import LanguageTokenizer
from app.errors import RecipeError
from app.models.blueprint import Blueprint
from app.models.factory import blueprint_of
from app.models.traits import is_hugging_face
from app.storage import is_local, local_copy, local_folder, to_path
from app.tasks import ServedTask, find_served_task, find_task
from app.tasks.language import LanguageModeling


@dataclass(frozen=True)
class TrainedModel:
    """A model in evaluation mode, with the recipe, processor and targets that it was trained with."""

    model: nn.Module
    recipe: Recipe
    task: ServedTask
    processor: Processor
    targets: Outputs


@dataclass(frozen=True)
class Architecture:
    """A trained model without its weights."""

    blueprint: Blueprint
    recipe: Recipe
    task: ServedTask
    processor: Processor
    targets: Outputs


def publish_weights(
    export: Callable[[Path], None], data: PreparedData, recipe: Recipe, folder: UPath, adapter: UPath | None = None
) -> None:
    """Write the weights folder. Its checksums are written last.

    For a Hugging Face model it contains ``config.json``, so that ``from_pretrained`` reads the folder. An adapter is
    merged into the weights, and also written on its own to the folder ``adapter``.

    Args:
        export: writes the trained tensors as a safetensors file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = blueprint_of(recipe.model, data.facts).model
    # Libraries write local files only, and ``folder`` may lie in an object store.
    with tempfile.TemporaryDirectory(prefix="rayloom-weights-") as temporary:
        export(Path(temporary) / WEIGHTS_FILE)
        if recipe.model.adapter:
            _separate(Path(temporary) / WEIGHTS_FILE, recipe, data, adapter)
        if is_hugging_face(model):
            configuration: Any = model.config
            # transformers sets this when it saves a model. Here only the configuration is saved.
            configuration.architectures = [type(model).__name__]
            if labels := getattr(data, "labels", None):
                configuration.id2label = dict(enumerate(labels))
                configuration.label2id = {label: index for index, label in enumerate(labels)}
            configuration.save_pretrained(temporary)
        for file in to_path(temporary).iterdir():
            file.copy(folder / file.name)
    (folder / RECIPE_FILE).write_text(dump_recipe(recipe), encoding="utf-8")
    data.save_codec(folder)
    write_checksums(folder)


def _separate(file: Path, recipe: Recipe, data: PreparedData, folder: UPath | None) -> None:
    """Merge the adapter into the weights in ``file``. Write it on its own to ``folder``, with checksums."""
    from app.models.adapter import TrainedAdapter

    assert recipe.model.adapter is not None
    model = blueprint_of(recipe.model, data.facts, adapted=True).model
    # The merged weights take the name of the file.
    adapted = file.rename(file.with_name("adapted.safetensors"))
    with TrainedAdapter.of(adapted, recipe.model.adapter.lora, model) as trained:
        trained.write_merged(file)
        if folder is not None:
            with tempfile.TemporaryDirectory(prefix="rayloom-adapter-") as temporary:
                trained.write_apart(Path(temporary), recipe.model)
                folder.mkdir(parents=True, exist_ok=True)
                for written in to_path(temporary).iterdir():
                    written.copy(folder / written.name)
            write_checksums(folder)
    # Otherwise it would be published beside the merged weights.
    adapted.unlink()


def convert_weights(weights: Path, folder: UPath) -> None:
    """Write a local weights folder of ``app.models.gpt`` in Hugging Face's layout, with its tokenizer.

    Raises:
        RecipeError: the model is another, or no language model.
    """
    from app.models.gpt_export import to_transformers

    recipe = load_stored_recipe(str(weights / RECIPE_FILE))
    if not isinstance(find_task(recipe.task), LanguageModeling):
        raise RecipeError(f"the run is of task {recipe.task}: only language models can be written for transformers").of(
            "task.not_exported"
        )
    tokenizer = LanguageTokenizer.load(to_path(weights))
    tensors = safetensors.torch.load_file(weights / WEIGHTS_FILE, backend="pread")
    converted = to_transformers(blueprint_of(recipe.model, tokenizer.facts).load(tensors))
    with local_folder(folder) as local:
        converted.save_pretrained(local)
        tokenizer.save(to_path(local))
        for file in to_path(local).iterdir() if not is_local(folder) else ():
            file.copy(folder / file.name)


def load_weights(folder: UPath, max_bytes: float = math.inf) -> TrainedModel:
    """Load the model of a weights folder.

    Args:
        max_bytes: as for ``read_weights``.

    Raises:
        StorageError: the folder is missing, or a file in it was changed.
    """
    verify_checksums(folder)
    with local_copy(folder) as path:
        return read_weights(path, max_bytes)


def read_weights(folder: Path, max_bytes: float = math.inf) -> TrainedModel:
    """Load the model of a local folder whose files have been verified. Its weights are in memory only once.

    Args:
        max_bytes: the size above which weights are mapped instead of read. The kernel takes their pages back when
            memory is short. Nobody may change the file while the model is in use.

    Raises:
        RecipeError: the recipe builds a different model from the one that was trained.
    """
    architecture = read_architecture(folder)
    path = folder / WEIGHTS_FILE
    try:
        # A mapped file could change later.
        backend = "mmap" if path.stat().st_size > max_bytes else "pread"
        model = architecture.blueprint.load(safetensors.torch.load_file(path, backend=backend))
    except ValueError as error:
        raise RecipeError(
            f"{str(path)!r} does not fit {architecture.recipe.model.title}: {error}; restore the "
            "factory's code from when the model was trained"
        ).of("weights.other_model") from error
    return TrainedModel(
        model.eval(), architecture.recipe, architecture.task, architecture.processor, architecture.targets
    )


def read_architecture(folder: Path) -> Architecture:
    """Return the trained model without reading its weights. A large model's tensors are not allocated."""
    files = to_path(folder)
    recipe = load_stored_recipe(str(files / RECIPE_FILE))
    task = find_served_task(recipe.task)
    processor, targets = task.processor.load(files), task.targets.load(files)
    blueprint = blueprint_of(recipe.model, {**targets.facts, **processor.facts})
    return Architecture(blueprint, recipe, task, processor, targets)
