"""How much of the hardware's arithmetic the model uses."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count


def flops_per_sample(model: nn.Module, inputs: Mapping[str, Tensor]) -> float:
    """Floating-point operations of training on one sample, of the shape that ``inputs`` has.

    The forward pass of the batch is counted, and taken three times: the backward pass multiplies twice
    as many matrices (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). For a decoder this is
    6 N + 12 L H Q T for each token (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), N the weights
    that are multiplied, L layers, H heads of size Q, T tokens. A multiplication and an addition are two
    operations; attention counts whole, masked or not; activations that are computed again do not count.
    Only matrix products, convolutions and attention count: recurrent layers, which torch runs as one
    operation, are missed.

    Args:
        model: run once on ``inputs``, without gradients; its mode, buffers and random state stay.
        inputs: its tensors by name, each of shape (batch, …).
    """
    counter = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
    with _unchanged(model, inputs), torch.no_grad(), counter:
        model(**inputs)
    return 3 * counter.get_total_flops() / len(next(iter(inputs.values())))


def utilisation(samples_per_s: float, flops_per_sample: float, world_size: int, peak: float | None) -> float | None:
    """Model FLOPs utilisation: the share of the workers' peak that the model's own operations take.

        MFU = samples/s x operations per sample / (workers x peak operations/s of one)

    (Chowdhery et al. 2022, arXiv:2204.02311, appendix B.)

    Args:
        samples_per_s: of all workers together.
        flops_per_sample: from the function of this name.
        world_size: number of workers.
        peak: operations per second of one worker's device; None, if it is not known, gives None.
    """
    return samples_per_s * flops_per_sample / (world_size * peak) if peak else None


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    flops: int = sdpa_flop_count(query, key, value)  # type: ignore[no-untyped-call]
    return flops


CPU_ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
"""What torch's table of operations lacks."""


@contextmanager
def _unchanged(model: nn.Module, inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """Put back what a forward pass changes; the fused encoder layers of evaluation, not counted, are off."""
    devices = {each.device.index for each in inputs.values() if each.is_cuda}
    buffers = {buffer: buffer.clone() for buffer in model.buffers()}
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        with torch.no_grad():
            for buffer, before in buffers.items():
                buffer.copy_(before)
