"""Properties of a model that a parallelism plan depends on: its kind, and how it can be split."""

import math
import sys
from dataclasses import replace
from enum import Enum, auto

from torch import nn

from app.config import ModelTraits
from app.errors import RecipeError
from app.models.splitting import cuts_of, layers_of, parameters_of, stages_of


class ModelKind(Enum):
    """The implementation that splits a model and recomputes its activations."""

    PLAIN = auto()
    """None."""
    STAGED = auto()
    """Rayloom, by the layers and matrices that the model names (``app.models.staged``) or that known decoders have."""
    HUGGING_FACE = auto()
    """DeepSpeed's automatic tensor parallelism. ``transformers`` recomputes the activations."""


def kind_of(model: nn.Module) -> ModelKind:
    """Return the kind of ``model``, which is whole, not a stage."""
    if stages_of(model) is not None and not has_adapter(model):
        return ModelKind.STAGED
    return ModelKind.HUGGING_FACE if is_hugging_face(model) else ModelKind.PLAIN


def has_adapter(model: nn.Module) -> bool:
    """Return whether PEFT has put an adapter into the model. Its matrices are not split then."""
    return hasattr(model, "peft_config")


def require_apart(model: nn.Module) -> None:
    """Raise RecipeError unless the model keeps conversations apart that are packed into a row.

    Models of transformers do whose code makes its mask with ``create_causal_mask``, as long as they keep no cache.
    """
    config, module = getattr(model, "config", None), sys.modules.get(type(model).__module__)
    makes_mask = hasattr(module, "create_causal_mask") and not getattr(config, "use_cache", True)
    if not makes_mask:
        raise RecipeError(
            f"model {type(model).__name__} does not keep packed conversations apart: set data.chat.packing to false"
        ).of("packing.unsupported", "data.chat.packing")


def is_hugging_face(model: nn.Module) -> bool:
    """Return whether the model is one of ``transformers``. Some of them are staged too."""
    return hasattr(model, "gradient_checkpointing_enable") and hasattr(model, "config")


def traits_of(model: nn.Module) -> ModelTraits:
    """Return how the model can be split. Raises RecipeError if the layers of a staged model are not the whole model."""
    has_frozen = not all(parameter.requires_grad for parameter in model.parameters())
    has_scalars = any(parameter.dim() == 0 for parameter in model.parameters())
    return replace(_split_traits(model), has_frozen=has_frozen, has_scalars=has_scalars)


def _split_traits(model: nn.Module) -> ModelTraits:
    name = type(model).__name__
    match kind_of(model):
        case ModelKind.STAGED:
            layers = sum(1 for layer in layers_of(model) if any(True for _ in parameters_of(layer)))
            # This is always computed, because it checks the plan of the matrices.
            common_width = _common_width(model)
            divisor = _first_number(stages_of(model), "heads") or common_width
            return ModelTraits(name, layers, divisor, checkpoints_activations=True)
        case ModelKind.HUGGING_FACE:
            if has_adapter(model):
                return ModelTraits(f"{name} with an adapter", None, None, checkpoints_activations=True)
            # With grouped queries there are fewer heads of keys and values, and these must be divided.
            divisor = _first_number(model.config, "num_key_value_heads", "num_attention_heads", "n_head")
            return ModelTraits(name, None, divisor, checkpoints_activations=True)
        case ModelKind.PLAIN:
            return ModelTraits(name, None, None, checkpoints_activations=False)


def _common_width(model: nn.Module) -> int | None:
    """Return the greatest common divisor of the split sides of all matrices in a staged model's plan."""
    cuts = cuts_of(model)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    sides = [
        linears[name].out_features if cut == "colwise" else linears[name].in_features for name, cut in cuts.items()
    ]
    return math.gcd(*sides) if sides else None


def _first_number(owner: object, *names: str) -> int | None:
    """Return the first of these attributes that is a number."""
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)
