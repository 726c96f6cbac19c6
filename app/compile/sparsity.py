"""2:4 structured sparsity, which NVIDIA GPUs from Ampere on multiply twice as fast (SM80 and later)."""

import copy

import torch
from torch import nn

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_GROUP, _KEPT = 4, 2


def prune_2_to_4(model: nn.Module) -> nn.Module:
    """A copy in which two of four consecutive weights along the input channels are zero, those of least magnitude.

    Layers whose input channels are no multiple of four stay as they are. ``torch.ao.pruning.WeightNormSparsifier`` has
    its blocks along the last axis, which in a convolution is the picture's, not the channels'.
    """
    pruned = copy.deepcopy(model)
    for layer in pruned.modules():
        if isinstance(layer, _LAYERS) and layer.weight.shape[1] % _GROUP == 0:
            with torch.no_grad():
                layer.weight.mul_(_mask(layer.weight))
    return pruned


def _mask(weight: torch.Tensor) -> torch.Tensor:
    """Ones for what is kept of ``weight``, whose second axis is the input channels."""
    groups = weight.abs().movedim(1, -1)
    shape = groups.shape
    groups = groups.reshape(-1, _GROUP)
    kept = torch.zeros_like(groups).scatter_(1, groups.topk(_KEPT, dim=1).indices, 1.0)
    return kept.reshape(shape).movedim(-1, 1)
