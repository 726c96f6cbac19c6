"""Models that give a text a vector of length 1."""

import inspect
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from app.models.text import EncoderClassifier


class _TextEmbedder(EncoderClassifier):
    """``EncoderClassifier`` whose linear layer gives a vector."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return vectors (batch, dimensions) of length 1 for ids and mask, each int64 of shape (batch, length)."""
        return functional.normalize(super().forward(input_ids, attention_mask), dim=-1)


def text_embedder(vocab_size: int, max_length: int, unknown_id: int, dimensions: int, **args: Any) -> nn.Module:
    """Return an encoder with fresh weights. ``args`` are those of ``EncoderClassifier``."""
    return _TextEmbedder(vocab_size, dimensions, max_length, unknown_id, **args)


def mean_pooled(model: nn.Module) -> nn.Module:
    """Have an encoder of transformers answer the mean of its tokens' vectors, scaled to length 1.

    Its parameters keep their names, so transformers reads the weights.
    """
    changed: Any = model
    encoder: Any = type(model)  # a type can be hashed, which mypy does not see
    if "add_pooling_layer" in inspect.signature(encoder.__init__).parameters:
        changed.pooler = None  # nothing would train it, because its output is not used
    changed.__class__ = _mean_pooled(encoder)
    return model


@cache
def _mean_pooled(encoder: Any) -> type[nn.Module]:
    def forward(self: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = encoder.forward(self, input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    # The name is written into config.json, from which transformers builds its own class.
    return type(encoder.__name__, (encoder,), {"forward": forward, "__module__": encoder.__module__})
