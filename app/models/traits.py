"""What a model offers to a parallel plan."""

import math

from torch import nn

from app.config import ModelTraits
from app.models.kind import ModelKind, kind_of
from app.models.staged import cuts_of, layers_of, parameters_of


def traits_of(model: nn.Module) -> ModelTraits:
    """How the model can be cut, from what it implements. Raises RecipeError for a staged model that is not whole."""
    kind = kind_of(model)
    staged = kind is ModelKind.STAGED
    return ModelTraits(
        name=type(model).__name__,
        layers=sum(1 for layer in layers_of(model) if any(True for _ in parameters_of(layer))) if staged else None,
        heads=_heads(model) or (_common_width(model) if staged else None),
        checkpoints_activations=kind is not ModelKind.PLAIN,
    )


def _common_width(model: nn.Module) -> int | None:
    """The greatest number that divides the cut side of every matrix of a staged model's plan."""
    cuts = cuts_of(model)
    linears = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    sides = [
        linears[name].out_features if cut == "colwise" else linears[name].in_features for name, cut in cuts.items()
    ]
    return math.gcd(*sides) if sides else None


def _heads(model: nn.Module) -> int | None:
    """Heads that a tensor degree must divide: of grouped queries the fewer ones of keys and values."""
    config = getattr(model, "config", model)
    for name in ("num_key_value_heads", "num_attention_heads", "n_head", "heads"):
        if isinstance(found := getattr(config, name, None), int):
            return found
    return None
