"""Placement of a model's tensors: each is made in the precision and the parts in which ZeRO keeps it."""

from typing import Any

import torch
from torch import Tensor, nn

from app.config import TrainConfig
from app.models.blueprint import Blueprint, Finish
from app.models.precision import TORCH_DTYPES
from app.storage import no_op
from app.training.engine.deepspeed_internals import partition_by
from app.training.engine.nvme import parameter_swapper
from app.training.worker import import_deepspeed


def make_in_place(blueprint: Blueprint, config: TrainConfig, deepspeed: dict[str, Any]) -> nn.Module:
    """Make the model of a data-parallel rank: in the plan's precision, and under ZeRO 3 only its part of each tensor.

    DeepSpeed would do the same to a whole model in float32. The values are equal to the bit.
    """
    if config.plan.powersgd:
        return blueprint.make(torch.Tensor.contiguous)  # torch's reduction needs float32
    partition = _Partition(deepspeed, TORCH_DTYPES[config.precision])
    is_split = config.plan.zero_stage == 3 and not config.plan.zero_plus_plus.hpz_partition_size > 1
    model = blueprint.make(in_precision(config), partition if is_split else no_op)
    if is_split:
        _move_buffers(model)
        _share_adapted_weights(model)
    return model


def in_precision(config: TrainConfig) -> Finish:
    """Return a function that converts floating-point values to the dtype that training computes in.

    It stores all values by rows. DeepSpeed takes no others, such as matrices that a factory has transposed.
    """
    dtype = TORCH_DTYPES[config.precision]

    def convert(value: Tensor) -> Tensor:
        is_converted = dtype != torch.float32 and value.is_floating_point()
        return (value.to(dtype) if is_converted else value).contiguous()

    return convert


class _Partition:
    """Keeps this rank's part of each parameter, as ``deepspeed.zero.Init`` does after each module.

    The context manager ``zero.Init`` is not used: a factory that initialises weights after making their module would
    then draw no random numbers for them.
    """

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        self._config, self._dtype = config, dtype
        self._zero_init: Any = None

    def __call__(self, parameter: Any) -> None:
        if self._zero_init is None:
            # Once, because it reads the configuration and sets up its groups.
            self._zero_init = import_deepspeed().zero.Init(
                module=nn.Module(),
                config_dict_or_path=self._config,
                param_swapper=parameter_swapper(self._config, self._dtype),
            )
        partition_by(self._zero_init, parameter)


def _share_adapted_weights(model: nn.Module) -> None:
    """Have ZeRO 3 also gather a frozen weight for DoRA's module, which reads it outside of the weight's own module."""
    module: Any
    for module in model.modules():
        for reader in getattr(module, "lora_magnitude_vector", {}).values():
            import_deepspeed().zero.register_external_parameter(reader, module.base_layer.weight)


def _move_buffers(model: nn.Module) -> None:
    """Move the buffers to the device. DeepSpeed does not move a partitioned model."""
    from deepspeed.accelerator import get_accelerator

    device = torch.device(get_accelerator().current_device_name())
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            setattr(module, name, buffer.to(device))
