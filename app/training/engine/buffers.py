"""The buffers of a model's state, such as the running statistics of batch norm."""

import torch
from torch import Tensor
from torch.distributed import all_reduce, get_world_size

from app.training.engine.engine import TrainingEngine


def buffers_of(engine: TrainingEngine) -> dict[str, Tensor]:
    """Return the persistent buffers of this rank, by their name in the whole model."""
    found = {}
    for module in engine.deepspeed.module.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and id(module) in engine.names:
                found[f"{engine.names[id(module)]}.{name}".lstrip(".")] = buffer
    return found


@torch.no_grad()
def mean_buffers(engine: TrainingEngine) -> dict[str, Tensor]:
    """Return the buffers averaged over the data-parallel ranks. Integer buffers, such as counts, are this rank's own.

    Collective. Means are computed in float64, so buffers that are equal on all ranks stay equal to the bit.
    """
    means = buffers_of(engine)
    floating = {name: buffer for name, buffer in means.items() if buffer.is_floating_point()}
    if not floating:
        return means
    group = engine.deepspeed.data_parallel_group
    flat = torch.cat([buffer.double().flatten() for buffer in floating.values()])
    all_reduce(flat, group=group)
    parts = torch.split(flat / get_world_size(group), [buffer.numel() for buffer in floating.values()])
    for (name, buffer), part in zip(floating.items(), parts, strict=True):
        means[name] = part.view_as(buffer).to(buffer.dtype)
    return means


@torch.no_grad()
def average_buffers(engine: TrainingEngine) -> None:
    """Set the buffers of every data-parallel rank to their mean, so that all ranks validate and save one model."""
    buffers = buffers_of(engine)
    for name, mean in mean_buffers(engine).items():
        buffers[name].copy_(mean)
