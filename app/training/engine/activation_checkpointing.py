"""Activations that the backward pass computes again (Chen et al. 2016, arXiv:1604.06174)."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from app.errors import TrainingError
from app.models.staged import Tied, layers_of
from app.models.traits import ModelKind, is_hugging_face, kind_of


def recompute_activations(model: nn.Module) -> None:
    """Keep only what passes between the layers of a staged or Hugging Face model.

    Raises:
        TrainingError: the model is neither.
    """
    if is_hugging_face(model):  # first: the layers of one that is staged too are not those of its forward pass
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    elif kind_of(model) is ModelKind.STAGED:
        for layer in layers_of(model):
            if not isinstance(layer, Tied):
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    else:
        raise TrainingError(
            f"plan.activation_checkpointing: {type(model).__name__} is neither staged nor of Hugging Face: "
            "set it to false"
        )
