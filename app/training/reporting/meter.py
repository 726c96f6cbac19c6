"""The model FLOPs utilisation of a step, measured by the first worker."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from app.best_effort import attempt
from app.config import Layout, TrainConfig
from app.models.factory import SMALL_BYTES
from app.models.precision import TORCH_DTYPES
from app.telemetry.mfu import flops_per_sample, peak_flops, utilisation
from app.training.data.feed import MicroBatch
from app.training.worker import Worker

_SAMPLES = [0, -1]
"""Samples of a micro-batch on which operations are counted. Batch norm needs more than one sample. In a micro-batch of
one, that sample is taken twice."""


@dataclass
class Meter:
    """Counts the operations of this worker's micro-batches on a copy of the model."""

    layout: Layout
    device: torch.device
    dtype: torch.dtype
    model: nn.Module | None
    """The copy, on the CPU or on the meta device. None in all workers but the first."""
    _by_shape: dict[tuple[torch.Size, ...], float | None] = field(default_factory=dict)
    _has_begun: bool = False

    @classmethod
    def of(cls, model: nn.Module, config: TrainConfig, layout: Layout, worker: Worker) -> "Meter":
        """Create a meter for the whole ``model``, before it is split."""
        return cls(layout, worker.device, TORCH_DTYPES[config.precision], _copy(model) if worker.is_first else None)

    def utilisation(self, batch: MicroBatch, samples: int, seconds: float) -> float | None:
        """Return the model FLOPs utilisation of a step on micro-batches like ``batch``; None if unknown.

        The step took ``seconds`` for a global batch of ``samples``.

        It is unknown for the first step. Counting operations and measuring the CPU takes longer than a small step, and
        would delay its record.
        """
        is_first, self._has_begun = not self._has_begun, True
        if is_first or (flops := self._flops(batch.inputs)) is None:
            return None
        return utilisation(samples / self.layout.data / seconds, flops, self.layout.model_parallel, self._peak)

    @cached_property
    def _peak(self) -> float | None:
        """Operations per second of the device."""
        return peak_flops(self.device, self.dtype)

    def _flops(self, inputs: Mapping[str, Tensor]) -> float | None:
        """Return the operations of training on one sample of this shape. They are counted once per shape."""
        key = tuple(tensor.shape[1:] for tensor in inputs.values())
        if self.model is not None and key not in self._by_shape:
            # A shape that cannot be counted is not tried again.
            count = partial(self._count, inputs)
            self._by_shape[key] = attempt(count, "the model's operations cannot be counted, so there is no MFU")
        return self._by_shape.get(key)

    def _count(self, inputs: Mapping[str, Tensor]) -> float | None:
        assert self.model is not None
        device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        samples = {
            name: tensor[_SAMPLES].to(device, torch.float32 if tensor.is_floating_point() else None)
            for name, tensor in inputs.items()
        }
        return flops_per_sample(self.model, samples)


def _copy(model: nn.Module) -> nn.Module:
    """Copy ``model``. Copy a large one to the meta device, without its values.

    To compute shapes on the meta device torch imports more modules. That takes longer than running a small model.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if sum(tensor.nbytes for tensor in tensors) <= SMALL_BYTES:
        return copy.deepcopy(model)
    on_meta: dict[int, Tensor] = {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    for parameter in model.parameters():
        on_meta[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"))
    return copy.deepcopy(model, on_meta)
