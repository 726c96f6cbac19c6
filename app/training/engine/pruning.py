"""Fine-tuning after pruning to 2-of-4 sparsity: the start from trained weights, and the zeros that stay."""

import safetensors.torch
from torch import nn
from upath import UPath

from app.artifacts import RECIPE_FILE, WEIGHTS_FILE
from app.checksums import verify_checksums
from app.config import PruneConfig, Recipe, load_stored_recipe
from app.errors import RecipeError
from app.models.blueprint import Blueprint
from app.models.sparsity import hold_zeros, prunable_weights, prune_2_to_4
from app.storage import local_copy, to_path


def require_same_model(recipe: Recipe) -> None:
    """Check that the weights to prune are of the recipe's model, trained on its data. Its plan is resolved.

    Raises:
        StorageError: the folder is missing, or a file in it was changed.
        RecipeError: the weights are of another model, or of other data, or the plan splits the matrices.
    """
    assert recipe.train.prune is not None
    plan = recipe.train.plan
    if plan.zero_stage == 3 or plan.model_parallel > 1 or plan.powersgd:
        raise RecipeError(
            "train.prune holds zeros in whole matrices: set train.plan.zero_stage to 2 or less, and leave pipeline, "
            "tensor and powersgd out of train.plan"
        ).of("prune.split", "train.prune")
    folder = to_path(recipe.train.prune.weights)
    verify_checksums(folder)
    trained = load_stored_recipe(str(folder / RECIPE_FILE))
    sections = {"data": trained.data == recipe.data, "model": trained.model.as_given == recipe.model.as_given}
    for section, is_same in sections.items():
        if not is_same:
            raise RecipeError(
                f"train.prune.weights {str(folder)!r} were trained with another {section} section: expected the same, "
                "so take the recipe of that run"
            ).of("weights.other_model", "train.prune.weights")


def start_pruned(model: nn.Module, config: PruneConfig) -> None:
    """Give the model trained weights, prune them, and have the zeros stay in training.

    Raises:
        RecipeError: the weights do not fit the model, or no matrix of it can be pruned.
    """
    _load(model, to_path(config.weights))
    if not any(True for _ in prunable_weights(model)):
        raise RecipeError(
            f"train.prune: {type(model).__name__} has no linear layer, convolution or attention with a multiple of "
            "four input channels: leave it out"
        ).of("prune.no_layers", "train.prune")
    model.load_state_dict(prune_2_to_4(model).state_dict())
    hold_zeros(model)


def _load(model: nn.Module, folder: UPath) -> None:
    with local_copy(folder) as local:
        values = safetensors.torch.load_file(local / WEIGHTS_FILE, backend="pread")
    try:
        Blueprint(model).load(values)
    except ValueError as error:
        raise RecipeError(
            f"train.prune.weights {str(folder)!r} do not fit {type(model).__name__}: {error}; restore the "
            "factory code that they were trained with"
        ).of("weights.other_model", "train.prune.weights") from error
