"""The card: the rates of a large matrix product and a large copy, compared with its data sheet."""

import time
from collections.abc import Callable
from statistics import median

import torch

from app.telemetry.record import memory_record
from benchmarks.gpu.bench import Bench

_SIDE, _COPIED_BYTES = 8192, 2**32
_SMALL_SIDE, _SMALL_BYTES = 512, 2**24
_REPEATS = 10


def measure(bench: Bench) -> None:
    """Record the rates of a bf16 product of random matrices and of a copy, beside the data sheet's."""
    device, card = torch_device(bench), bench.cluster.device
    side, nbytes = (_SMALL_SIDE, _SMALL_BYTES) if bench.is_small else (_SIDE, _COPIED_BYTES)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        bench.figure("memory", properties.total_memory / 2**30, "GiB")
        bench.figure("compute capability", f"{properties.major}.{properties.minor}")
    # Zeros would draw less power, and so run faster than real data.
    matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    product_s = median_s(lambda: matrix @ matrix, device)
    bench.compare("bf16 product", 2 * side**3 / product_s / 1e12, "TFLOP/s", card.half_flops / 1e12, "data sheet")
    source = torch.randint(256, (nbytes,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), device)
    # A copy reads and writes every byte.
    bench.compare("copy", 2 * nbytes / copy_s / 1e9, "GB/s", card.memory_bandwidth / 1e9, "data sheet")
    bench.figure("peak memory", memory_record(device).peak_bytes / 2**30, "GiB")


def torch_device(bench: Bench) -> torch.device:
    """Return the step's device as torch names it."""
    return torch.device("cuda" if bench.device == "gpu" else "cpu")


def wait_for(device: torch.device) -> None:
    """Wait until ``device`` has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(work: Callable[[], object], device: torch.device, repeats: int = _REPEATS) -> float:
    """Return the median seconds of ``work``, after three warm-up calls. Wait for the device after each call."""
    seconds = []
    for _ in range(3 + repeats):
        wait_for(device)
        began = time.perf_counter()
        work()
        wait_for(device)
        seconds.append(time.perf_counter() - began)
    return median(seconds[3:])
