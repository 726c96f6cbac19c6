"""2-of-4 structured sparsity (2:4), which NVIDIA GPUs from Ampere on multiply twice as fast (SM80 and later)."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_GROUP, _KEPT = 4, 2


def prune_2_to_4(model: nn.Module) -> nn.Module:
    """Return a copy in which the two smallest of four consecutive weights along the input channels are zero.

    Linear layers, convolutions and attention are pruned if their number of input channels is a multiple of four.
    ``torch.ao.pruning.WeightNormSparsifier`` groups weights along the last axis. In a convolution that is the width of
    the image, not the channels.
    """
    pruned = copy.deepcopy(model)
    with torch.no_grad():
        for weight in prunable_weights(pruned):
            weight.mul_(_mask(weight))
    return pruned


def hold_zeros(model: nn.Module) -> int:
    """Have the weights that are zero stay zero in training, and return how many weights there are to hold.

    Their gradients become zero, so an optimizer without a state of an earlier step leaves them, whatever its decay.
    """
    weights = list(prunable_weights(model))
    for weight in weights:
        weight.register_hook(_HeldZeros(weight))  # type: ignore[no-untyped-call]
    return len(weights)


class _HeldZeros:
    """A gradient hook that holds zero weights at zero. DeepSpeed may move the weights to a GPU later."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._mask = weight.detach() != 0

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        self._mask = self._mask.to(gradient.device)  # copied once
        return gradient * self._mask


def prunable_weights(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the weights that multiply inputs, where these are a multiple of four. The inputs are the second axis."""
    for layer in model.modules():
        weights: list[Any] = []
        if isinstance(layer, _LAYERS):
            weights = [layer.weight]
        elif isinstance(layer, nn.MultiheadAttention):  # its output layer is an nn.Linear
            weights = [layer.in_proj_weight, layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
        yield from (weight for weight in weights if weight is not None and weight.shape[1] % _GROUP == 0)


def _mask(weight: torch.Tensor) -> torch.Tensor:
    """Return ones where ``weight`` is kept and zeros elsewhere."""
    groups = weight.abs().movedim(1, -1)
    shape = groups.shape
    groups = groups.reshape(-1, _GROUP)
    kept = torch.zeros_like(groups).scatter_(1, groups.topk(_KEPT, dim=1).indices, 1.0)
    return kept.reshape(shape).movedim(-1, 1)
