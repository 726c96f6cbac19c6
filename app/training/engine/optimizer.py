"""The optimizer, and the schedule of its learning rate."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from app.config import ScheduleConfig, TrainConfig
from app.training.engine.deepspeed_internals import unpartitioned_shape
from app.training.engine.extensions import load_extension

_NUM_GROUPS, _MIN_GROUP_SIZE = 16, 2**22
"""Number of parameter groups of a large model, and minimum number of elements of a group."""


def create_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Return the recipe's optimizer. Vectors (biases, norms) are not decayed. With offload it computes on the CPU."""
    optimizer = config.optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    size = sum(map(num_elements, trained)) if config.plan.offload == "nvme" else _group_size(trained)
    groups = [
        {"params": part, "weight_decay": decay}
        for decay, parameters in (
            (optimizer.weight_decay, [parameter for parameter in trained if len(unpartitioned_shape(parameter)) > 1]),
            (0.0, [parameter for parameter in trained if len(unpartitioned_shape(parameter)) < 2]),
        )
        for part in _parts(parameters, size)
    ]
    if optimizer.name == "sgd":
        return torch.optim.SGD(groups, lr=optimizer.lr, momentum=optimizer.momentum)
    if config.plan.offload != "none":
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.ops.op_builder import CPUAdamBuilder

        load_extension(CPUAdamBuilder())
        offloaded: torch.optim.Optimizer = DeepSpeedCPUAdam(
            groups, lr=optimizer.lr, betas=optimizer.betas, adamw_mode=True
        )
        return offloaded
    return torch.optim.AdamW(groups, lr=optimizer.lr, betas=optimizer.betas, fused=True)


def _group_size(parameters: Sequence[nn.Parameter]) -> int:
    """Return the number of elements per group. ZeRO holds the float32 gradients of one group at a time."""
    return max(sum(map(num_elements, parameters)) // _NUM_GROUPS, _MIN_GROUP_SIZE)


def _parts(parameters: Sequence[nn.Parameter], size: int) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters in order, in lists of at least ``size`` elements; the last may have fewer."""
    part: list[nn.Parameter] = []
    for parameter in parameters:
        part.append(parameter)
        if sum(map(num_elements, part)) >= size:
            yield part
            part = []
    if part:
        yield part


def num_elements(parameter: nn.Parameter) -> int:
    """Return the number of elements of the whole parameter, also where ZeRO 3 has partitioned it."""
    return unpartitioned_shape(parameter).numel()


def create_scheduler(
    optimizer: torch.optim.Optimizer, config: TrainConfig, total_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the recipe's schedule over ``total_steps`` optimizer steps."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, total_steps, config.schedule))


def lr_factor(step: int, total_steps: int, config: ScheduleConfig) -> float:
    """Return the factor of the learning rate for optimizer step ``step``, from 0.

    It rises linearly to 1 over the first ``warmup_fraction`` of the steps. Then it stays (constant), or falls to 0 at
    the last step along a line or half a cosine (Loshchilov and Hutter 2016, arXiv:1608.03983).
    """
    warmup = int(config.warmup_fraction * total_steps)
    if step < warmup:
        # With the ones added, no step has a rate of 0.
        return (step + 1) / (warmup + 1)
    progress = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    match config.name:
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case "linear":
            return 1.0 - progress
        case "constant":
            return 1.0
