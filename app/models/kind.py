"""What kind of model it is, from what it implements; whatever depends on that asks here."""

from enum import Enum, auto

from torch import nn

from app.models.staged import stages_of


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
