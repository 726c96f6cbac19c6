"""The optimizer and its schedule."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from app.config import TrainConfig
from app.training.engine.extensions import load_extension
from app.training.engine.schedule import lr_factor

_GROUPS, _MIN_GROUP = 16, 2**22
"""Number of parameter groups of a large model, and minimum number of elements of a group."""


def create_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The recipe's optimizer; vectors (biases, norms) are not decayed. On the CPU for a plan that offloads."""
    optimizer = config.optimizer
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    size = sum(map(num_elements, learned)) if config.plan.offload == "nvme" else _group_size(learned)
    groups = [
        {"params": part, "weight_decay": decay}
        for decay, parameters in (
            (optimizer.weight_decay, [parameter for parameter in learned if len(_shape(parameter)) > 1]),
            (0.0, [parameter for parameter in learned if len(_shape(parameter)) < 2]),
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
    return max(sum(map(num_elements, parameters)) // _GROUPS, _MIN_GROUP)


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
    return _shape(parameter).numel()


def _shape(parameter: nn.Parameter) -> torch.Size:
    """Return the full shape of a parameter, also where ZeRO 3 has partitioned it."""
    whole: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return whole


def recall_steps(optimizer: Any, steps: int) -> None:
    """Have DeepSpeed's Adam of the CPU correct its bias as if it had done ``steps``, to the bit; no other needs it.

    In C++ it multiplies the powers of its betas from step to step, and takes them anew for a step that does not follow
    the last one, which rounds otherwise. So it is shown every step, with nothing to update.
    """
    if not hasattr(optimizer, "ds_opt_adam"):
        return
    rates, nothing = (0.0, *optimizer.defaults["betas"], 1.0, 0.0), [torch.empty(0)] * 4
    for step in range(1, steps + 1):
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, *rates, True, *nothing)


def create_scheduler(
    optimizer: torch.optim.Optimizer, config: TrainConfig, total_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """The recipe's schedule over ``total_steps`` optimizer steps."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, total_steps, config.schedule))
