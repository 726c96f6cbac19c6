"""Where a model's tensors come to lie: as ZeRO keeps them, from the moment that they are made."""

from typing import Any

import torch
from torch import Tensor, nn

from app.config import Layout, TrainConfig
from app.models.blueprint import Blueprint
from app.models.kind import kind_of
from app.models.precision import TORCH_DTYPES
from app.training.engine.deepspeed_config import deepspeed_config
from app.training.worker import import_deepspeed


def make_in_place(blueprint: Blueprint, config: TrainConfig, layout: Layout) -> nn.Module:
    """The model with the tensors of a data-parallel rank: in the plan's precision, under ZeRO 3 its part of each.

    DeepSpeed would do the same with a whole model in float32. The values are the same, to the bit.
    """
    if config.plan.powersgd:
        return blueprint.make()  # torch's reduction is built around float32
    dtype = TORCH_DTYPES[config.precision]
    partition = _Partition(deepspeed_config(config, layout, kind_of(blueprint.model)))
    is_split = config.plan.zero_stage == 3 and not config.plan.zero_plus_plus.hpz_partition_size > 1
    model = blueprint.make(
        finish=lambda value: value.to(dtype) if dtype != torch.float32 and value.is_floating_point() else value,
        place=partition if is_split else _keep,
    )
    if is_split:
        _move_buffers(model)
    return model


def _keep(parameter: nn.Parameter) -> None:
    """All of it."""


class _Partition:
    """Keeps of each parameter the part of this rank, as ``deepspeed.zero.Init`` does after each module.

    Not in its context: a factory that initialises a weight after its module is made would then draw no numbers.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._first: Any = None

    def __call__(self, parameter: Any) -> None:
        if self._first is None:
            alone = nn.ParameterList([parameter])
            import_deepspeed().zero.Init(module=alone, config_dict_or_path=self._config, dtype=parameter.dtype)
            self._first = parameter
        else:
            self._first.convert_to_zero_parameters(param_list=[parameter])


def _move_buffers(model: nn.Module) -> None:
    """To the device: DeepSpeed leaves a model that is partitioned where it is."""
    from deepspeed.accelerator import get_accelerator

    device = torch.device(get_accelerator().current_device_name())
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, Tensor):
                module._buffers[name] = buffer.to(device)
