"""The arithmetic that a device can do, and how much of it at most."""

import re
import time
from functools import cache
from typing import NamedTuple

import torch

from app.warnings import warn

_MEASURE_S = 0.2
_LONG_ENOUGH_S = 0.01


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
    """Operations per second that ``device`` can do at most on numbers of ``dtype``.

    Of a GPU its data sheet's, without sparsity; None, with a warning, if it is not in the table. Of a
    CPU what a product of two square matrices reaches on the threads that torch has; it is measured once
    in a process, in less than a second.
    """
    if device.type == "cpu":
        return _measured(dtype)
    return gpu_peak_flops(torch.cuda.get_device_name(device), dtype)


def computes_in_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for bf16; torch does without them on any other, slowly."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return any(has for name, has in torch.cpu.get_capabilities().items() if "bf16" in name)


def gpu_peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Operations per second of the GPU that torch calls ``name``.

    float32 is taken for TF32 if torch may use it in matrix products or convolutions. None, with a
    warning, for other dtypes, for a GPU that is not in the table, and for a slice of one (MIG).
    """
    peak = next((peak for pattern, peak in _GPUS.items() if re.fullmatch(pattern, name)), None)
    if peak is None or dtype not in (torch.float16, torch.bfloat16, torch.float32):
        warn(
            f"the peak of GPU {name!r} in {dtype} is not known, so model FLOPs utilisation is left out: "
            "add its dense figures to app/telemetry/peak.py"
        )
        return None
    if dtype != torch.float32:
        return peak.half * 1e12
    convolutions = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    return (peak.tf32 if "tf32" in (torch.backends.cuda.matmul.fp32_precision, convolutions) else peak.fp32) * 1e12


@cache
def _measured(dtype: torch.dtype) -> float:
    """The best rate in a short while, of matrices so large that a product takes some time."""
    side = 256
    while (seconds := _product_s(side, dtype)) < _LONG_ENOUGH_S:
        side *= 2
    until = time.perf_counter() + _MEASURE_S
    while time.perf_counter() < until:
        seconds = min(seconds, _product_s(side, dtype))
    return 2 * side**3 / seconds


def _product_s(side: int, dtype: torch.dtype) -> float:
    """Seconds of the second of two products; the first one prepares."""
    matrix = torch.ones(side, side, dtype=dtype)
    matrix @ matrix
    started = time.perf_counter()
    matrix @ matrix
    return time.perf_counter() - started
