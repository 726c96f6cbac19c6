"""Model FLOPs utilisation (MFU): the operations of a model, the peak of a device, and their ratio."""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from app.best_effort import warn

_MEASURE_S = 0.2
_LONG_ENOUGH_S = 0.01


def utilisation(samples_per_s: float, flops_per_sample: float, world_size: int, peak: float | None) -> float | None:
    """Return the model FLOPs utilisation: the share of the workers' peak that the model's own operations take.

        MFU = samples/s x operations per sample / (workers x peak operations/s of one)

    (Chowdhery et al. 2022, arXiv:2204.02311, appendix B.)

    Args:
        samples_per_s: of all workers together.
        flops_per_sample: from the function of this name.
        world_size: number of workers.
        peak: operations per second of one worker's device. None, if unknown, gives None.
    """
    return samples_per_s * flops_per_sample / (world_size * peak) if peak else None


def flops_per_sample(model: nn.Module, inputs: Mapping[str, Tensor]) -> float:
    """Return the floating-point operations of training on one sample of the shape that ``inputs`` has.

    The forward pass of the batch is counted, and taken three times: the backward pass multiplies twice as many matrices
    (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). For a decoder this is 6 N + 12 L H Q T per token (Chowdhery et
    al. 2022, arXiv:2204.02311, appendix B) with N weights in matrix products, L layers, H heads of size Q, T tokens. A
    multiplication and an addition are two operations. Attention counts whole, masked or not. Recomputed activations do
    not count. Only matrix products, convolutions, attention and recurrent layers count.

    Args:
        model: run once on ``inputs``, without gradients. Its mode, buffers and random state do not change.
        inputs: its tensors by name, each of shape (batch, …).
    """
    counter = FlopCounterMode(display=False, custom_mapping=OTHER_OPERATIONS)
    with _unchanged(model, inputs), torch.no_grad(), counter:
        model(**inputs)
    return 3 * counter.get_total_flops() / len(next(iter(inputs.values())))


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    flops: int = sdpa_flop_count(query, key, value)  # type: ignore[no-untyped-call]
    return flops


def _lstm_flops(inputs: torch.Size, input_weights: torch.Size, hidden_weights: torch.Size, *_: Any, **__: Any) -> int:
    """Return the operations of an LSTM in one direction: two products for each token, over all gates."""
    return 2 * inputs[:-1].numel() * (input_weights.numel() + hidden_weights.numel())


def _recurrent_flops(inputs: torch.Size, weights: Sequence[torch.Size], *_: Any, **__: Any) -> int:
    """Return the operations of all layers and directions that a GPU's library runs as one. Biases do not count."""
    return 2 * inputs[:-1].numel() * sum(weight.numel() for weight in weights if len(weight) > 1)


OTHER_OPERATIONS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten.mkldnn_rnn_layer: _lstm_flops,
    torch.ops.aten._cudnn_rnn: _recurrent_flops,
    torch.ops.aten.miopen_rnn: _recurrent_flops,
}
"""Operations that torch's table lacks."""


@contextmanager
def _unchanged(model: nn.Module, inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """Restore what a forward pass changes. Disable the fused encoder layers of evaluation, which are not counted."""
    devices = {tensor.device.index for tensor in inputs.values() if tensor.is_cuda}
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


class _Peak(NamedTuple):
    """Dense teraFLOP/s by kind of number: bf16 and fp16 with fp32 sums, TF32, fp32 outside the tensor cores."""

    half: float
    tf32: float
    fp32: float


# From NVIDIA's data sheets, halved where they count sparsity; docs/reference/training_metrics.md says which.
_GPUS = {
    r"NVIDIA GB200": _Peak(2500, 1250, 80),
    r"NVIDIA B200": _Peak(2250, 1125, 75),
    r"NVIDIA H200 NVL": _Peak(835.5, 417.5, 60),
    r"NVIDIA H200": _Peak(989.4, 494.7, 66.9),
    r"NVIDIA GH200 \d+GB": _Peak(989.4, 494.7, 66.9),
    r"NVIDIA H100 NVL": _Peak(835.5, 417.5, 60),
    r"NVIDIA H100 PCIe": _Peak(756, 378, 51.2),
    r"NVIDIA H100 \d+GB HBM3": _Peak(989.4, 494.7, 66.9),
    r"NVIDIA A100(-SXM4-\d+GB|-PCIE-\d+GB| 80GB PCIe)": _Peak(312, 156, 19.5),
    r"NVIDIA A30": _Peak(165, 82, 10.3),
    r"NVIDIA A10G": _Peak(70, 35, 31.5),
    r"NVIDIA A10": _Peak(125, 62.5, 31.2),
    r"NVIDIA L40S": _Peak(362, 183, 91.6),
    r"NVIDIA L40": _Peak(181, 90.5, 90.5),
    r"NVIDIA L4": _Peak(121, 60, 30.3),
    r"NVIDIA GeForce RTX 4090": _Peak(165.2, 82.6, 82.6),
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the maximum operations per second of ``device`` on numbers of ``dtype``.

    For a GPU it is the data sheet's figure, without sparsity. None, with a warning, if it is not in the table. For a
    CPU it is what a product of two square matrices reaches on torch's threads. It is measured once per process, in less
    than a second.
    """
    if device.type == "cpu":
        return _measured(dtype)
    return gpu_peak_flops(torch.cuda.get_device_name(device), dtype)


def computes_in_bf16(device: torch.device) -> bool:
    """Return whether the device has instructions for bf16. On others torch emulates them, slowly."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return any(is_there for name, is_there in torch.cpu.get_capabilities().items() if "bf16" in name)


def gpu_peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Return the maximum operations per second of the GPU that torch calls ``name``.

    float32 counts as TF32 if torch may use it in matrix products or convolutions. None, with a warning, for other
    dtypes, for a GPU that is not in the table, and for a slice of one (MIG).
    """
    # The whole name has to match, because a slice of a GPU has a longer one.
    peak = next((peak for pattern, peak in _GPUS.items() if re.fullmatch(pattern, name)), None)
    if peak is None or dtype not in (torch.float16, torch.bfloat16, torch.float32):
        warn(
            f"the peak of GPU {name!r} in {dtype} is not known, so model FLOPs utilisation is left out: "
            "add its dense figures to app/telemetry/mfu.py"
        )
        return None
    if dtype != torch.float32:
        return peak.half * 1e12
    convolutions = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    return (peak.tf32 if "tf32" in (torch.backends.cuda.matmul.fp32_precision, convolutions) else peak.fp32) * 1e12


@cache
def _measured(dtype: torch.dtype) -> float:
    """Return the best rate within ``_MEASURE_S``, for matrices so large that a product takes ``_LONG_ENOUGH_S``."""
    side = 256
    while (seconds := _product_s(side, dtype)) < _LONG_ENOUGH_S:
        side *= 2
    until = time.perf_counter() + _MEASURE_S
    while time.perf_counter() < until:
        seconds = min(seconds, _product_s(side, dtype))
    return 2 * side**3 / seconds


def _product_s(side: int, dtype: torch.dtype) -> float:
    """Return the seconds of the second of two products. The first one warms up."""
    matrix = torch.ones(side, side, dtype=dtype)
    matrix @ matrix
    started = time.perf_counter()
    matrix @ matrix
    return time.perf_counter() - started
