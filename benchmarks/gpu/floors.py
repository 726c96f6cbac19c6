"""The minimum time of a computation: its operations and bytes, divided by a data sheet's rates."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from app.config import ModelConfig, Precision, Recipe
from app.models.factory import build_model
from app.planner.cluster import Device
from app.telemetry.mfu import flops_per_sample

_ADAM_BYTES = 2 * 3 * 4
"""A step of Adam reads and writes three numbers of 4 bytes for each parameter: the weight and two averages."""
_NUMBER_BYTES: Mapping[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Floor:
    """The minimum work of a computation."""

    operations: float
    """Floating-point operations; a multiplication and an addition are two."""
    nbytes: float
    """Bytes read from and written to the device's memory, each input and output once."""

    def seconds(self, device: Device, precision: Precision) -> float:
        """Return the larger of the two times on ``device``."""
        return max(self.operations / device.flops(precision), self.nbytes / device.memory_bandwidth)

    def bound(self, device: Device, precision: Precision) -> str:
        """Return which time is larger: that of the operations or of the bytes."""
        computes = self.operations / device.flops(precision) >= self.nbytes / device.memory_bandwidth
        return f"{self.operations:.2g} operations" if computes else f"{self.nbytes:.2g} bytes"


def training_floor(recipe: Recipe) -> Floor:
    """Return the floor of an optimizer step of a language model on random tokens.

    Each micro-batch reads the weights in its forward and in its backward pass, and writes the gradients. The optimizer
    reads the gradients, reads and writes its state, and writes the weights.
    """
    operations, parameters = _work_of(recipe.model.model_dump_json(), **gpt_facts(recipe))
    config = recipe.train
    layout = config.layout(1)
    number = _NUMBER_BYTES[config.precision]
    batches = layout.gradient_accumulation * parameters * number * 3
    return Floor(
        operations=config.batch_size * operations,
        nbytes=batches + parameters * (_ADAM_BYTES + 2 * number),
    )


@cache  # the steps train two models, under ten plans
def _work_of(model: str, vocab_size: int, max_length: int) -> tuple[float, int]:
    """Return the operations of training on one sample and the parameters of ``model``, a ModelConfig as JSON."""
    with torch.device("meta"):
        shape = build_model(
            ModelConfig.model_validate_json(model), {"vocab_size": vocab_size, "max_length": max_length}
        )
        sample = torch.zeros(1, max_length, dtype=torch.int64)
    parameters = sum(parameter.numel() for parameter in shape.parameters())
    return flops_per_sample(shape, {"input_ids": sample}), parameters


def forward_floor(model: nn.Module, inputs: Mapping[str, Tensor], precision: Precision) -> Floor:
    """Return the floor of one forward pass on ``inputs``, which reads every weight once."""
    rows = len(next(iter(inputs.values())))
    weights = sum(parameter.numel() for parameter in model.parameters()) * _NUMBER_BYTES[precision]
    return Floor(
        operations=rows * flops_per_sample(model, inputs) / 3,
        nbytes=weights + sum(tensor.nbytes for tensor in inputs.values()),
    )


def gpt_facts(recipe: Recipe) -> dict[str, int]:
    """Return the dataset properties that a GPT needs."""
    return {"vocab_size": recipe.data.tokenizer.vocab_size, "max_length": recipe.data.block_length}
