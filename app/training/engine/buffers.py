"""The buffers of a model's state, such as the running statistics of batch norm."""

import torch
from torch import Tensor
from torch.distributed import all_reduce, get_world_size

from app.training.engine.engine import TrainingEngine


def buffers_of(engine: TrainingEngine) -> dict[str, Tensor]:
    """Those of this rank, by their name in the whole model."""
    found = {}
    for module in engine.deepspeed.module.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and id(module) in engine.names:
                found[f"{engine.names[id(module)]}.{name}".lstrip(".")] = buffer
    return found


@torch.no_grad()
def mean_buffers(engine: TrainingEngine) -> dict[str, Tensor]:
    """The same as means over the data-parallel ranks; whole numbers, such as counts, are this rank's own.

    Every rank calls it. Means are taken in float64, so that equal buffers stay as they are to the bit.
    """
    means = buffers_of(engine)
    fractions = {name: buffer for name, buffer in means.items() if buffer.is_floating_point()}
    if not fractions:
        return means
    group = engine.deepspeed.data_parallel_group
    flat = torch.cat([buffer.double().flatten() for buffer in fractions.values()])
    all_reduce(flat, group=group)
    parts = torch.split(flat / get_world_size(group), [buffer.numel() for buffer in fractions.values()])
    for (name, buffer), part in zip(fractions.items(), parts, strict=True):
        means[name] = part.view_as(buffer).to(buffer.dtype)
    return means


@torch.no_grad()
def average_buffers(engine: TrainingEngine) -> None:
    """Give every data-parallel rank the mean buffers of all: one model, which is validated and kept."""
    buffers = buffers_of(engine)
    for name, mean in mean_buffers(engine).items():
        buffers[name].copy_(mean)
