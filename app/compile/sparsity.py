"""2:4 structured sparsity, which NVIDIA GPUs from Ampere on multiply twice as fast (SM80 and later)."""

import copy
from collections.abc import Iterator

import torch
from torch import nn

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_GROUP, _KEPT = 4, 2


def prune_2_to_4(model: nn.Module) -> nn.Module:
    """A copy in which two of four consecutive weights along the input channels are zero, those of least magnitude.

    Of linear layers, convolutions and attention; those whose input channels are no multiple of four stay as they are.
    ``torch.ao.pruning.WeightNormSparsifier`` has its blocks along the last axis, which in a convolution is the
    picture's, not the channels'.
    """
    pruned = copy.deepcopy(model)
    with torch.no_grad():
        for weight in _weights(pruned):
            if weight.shape[1] % _GROUP == 0:
                weight.mul_(_mask(weight))
    return pruned


def _weights(model: nn.Module) -> Iterator[torch.Tensor]:
    """All that inputs are multiplied with; the second axis of each is the input channels."""
    for layer in model.modules():
        if isinstance(layer, _LAYERS):
            yield layer.weight
        elif isinstance(layer, nn.MultiheadAttention):  # its output layer is an nn.Linear
            projections = (layer.in_proj_weight, layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
            yield from (weight for weight in projections if weight is not None)


def _mask(weight: torch.Tensor) -> torch.Tensor:
    """Ones for what is kept of ``weight``."""
    groups = weight.abs().movedim(1, -1)
    shape = groups.shape
    groups = groups.reshape(-1, _GROUP)
    kept = torch.zeros_like(groups).scatter_(1, groups.topk(_KEPT, dim=1).indices, 1.0)
    return kept.reshape(shape).movedim(-1, 1)
