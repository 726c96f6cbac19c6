"""What kind of model it is, from what it implements; whatever depends on that asks here."""

from enum import Enum, auto

from torch import nn

from app.models.staged import Staged


class ModelKind(Enum):
    """Who can cut a model, and compute its activations again."""

    PLAIN = auto()
    """Nobody."""
    STAGED = auto()
    """Rayloom, by the layers and matrices that the model names (``app.models.staged``)."""
    HUGGING_FACE = auto()
    """DeepSpeed's automatic tensor parallelism, and ``transformers`` itself."""


def kind_of(model: nn.Module) -> ModelKind:
    """The kind of the whole ``model``."""
    if isinstance(model, Staged):
        return ModelKind.STAGED
    if hasattr(model, "gradient_checkpointing_enable") and hasattr(model, "config"):
        return ModelKind.HUGGING_FACE
    return ModelKind.PLAIN
