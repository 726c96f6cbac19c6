"""2:4 structured sparsity, which NVIDIA GPUs from Ampere on multiply twice as fast (SM80 and later)."""

import copy
from collections.abc import Iterator

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
        for weight in _weights(pruned):
            if weight.shape[1] % _GROUP == 0:
                weight.mul_(_mask(weight))
    return pruned


def _weights(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield all weights that multiply inputs. The second axis of each is the input channels."""
    for layer in model.modules():
        if isinstance(layer, _LAYERS):
            yield layer.weight
        elif isinstance(layer, nn.MultiheadAttention):  # its output layer is an nn.Linear
            projections = (layer.in_proj_weight, layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
            yield from (weight for weight in projections if weight is not None)


def _mask(weight: torch.Tensor) -> torch.Tensor:
    """Return ones where ``weight`` is kept and zeros elsewhere."""
    groups = weight.abs().movedim(1, -1)
    shape = groups.shape
    groups = groups.reshape(-1, _GROUP)
    kept = torch.zeros_like(groups).scatter_(1, groups.topk(_KEPT, dim=1).indices, 1.0)
    return kept.reshape(shape).movedim(-1, 1)
