"""What a model offers to a parallel plan."""

import math
from enum import Enum, auto

from torch import nn

from app.config import ModelTraits
from app.models.staged import cuts_of, layers_of, parameters_of, stages_of


class ModelKind(Enum):
    """Who can cut a model, and compute its activations again."""

    PLAIN = auto()
    """Nobody."""
    STAGED = auto()
    """Rayloom, by the layers and matrices that the model names (``app.models.staged``), or known decoders have."""
    HUGGING_FACE = auto()
    """DeepSpeed's automatic tensor parallelism; ``transformers`` computes the activations again."""


def kind_of(model: nn.Module) -> ModelKind:
    """The kind of the whole ``model``."""
    if stages_of(model) is not None:
        return ModelKind.STAGED
    return ModelKind.HUGGING_FACE if is_hugging_face(model) else ModelKind.PLAIN


def is_hugging_face(model: nn.Module) -> bool:
    """Return whether the model is one of ``transformers``. Some of them are staged too."""
    return hasattr(model, "gradient_checkpointing_enable") and hasattr(model, "config")


def traits_of(model: nn.Module) -> ModelTraits:
    """How the model can be cut, from what it implements. Raises RecipeError for a staged model that is not whole."""
    name = type(model).__name__
    match kind_of(model):
        case ModelKind.STAGED:
            layers = sum(1 for layer in layers_of(model) if any(True for _ in parameters_of(layer)))
            common_width = _common_width(model)  # also where it has heads: this checks how the matrices are cut
            divisor = _first_number(stages_of(model), "heads") or common_width
            return ModelTraits(name, layers, divisor, checkpoints_activations=True)
        case ModelKind.HUGGING_FACE:
            # Of grouped queries the fewer heads of keys and values.
            divisor = _first_number(model.config, "num_key_value_heads", "num_attention_heads", "n_head")
            return ModelTraits(name, None, divisor, checkpoints_activations=True)
        case ModelKind.PLAIN:
            return ModelTraits(name, None, None, checkpoints_activations=False)


def _common_width(model: nn.Module) -> int | None:
    """The greatest number that divides the cut side of every matrix of a staged model's plan."""
    cuts = cuts_of(model)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    sides = [
        linears[name].out_features if cut == "colwise" else linears[name].in_features for name, cut in cuts.items()
    ]
    return math.gcd(*sides) if sides else None


def _first_number(owner: object, *names: str) -> int | None:
    """The first of these attributes that is a number."""
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)
