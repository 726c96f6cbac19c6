"""The memory that training takes."""

import resource

import torch
from pydantic import BaseModel


class MemoryRecord(BaseModel):
    """The most memory that a worker has had at once, since it started."""

    peak_bytes: int
    """Of tensors on its GPU; without one, of the whole process (resident set)."""

    reserved_bytes: int | None = None
    """What torch's allocator has taken from the GPU at most."""

    fragmentation: float | None = None
    """1 - peak / reserved: the share of it that no tensor could use when most was in use."""


def memory_record(device: torch.device) -> MemoryRecord:
    """The peak of this process on ``device``; nothing is reset, so it only grows.

    Fragmentation takes both peaks for simultaneous: the allocator gives memory back only when it has to.
    """
    if device.type == "cpu":
        return MemoryRecord(peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)  # Linux counts KiB
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    fragmentation = 1 - allocated / reserved if reserved else 0.0
    return MemoryRecord(peak_bytes=allocated, reserved_bytes=reserved, fragmentation=fragmentation)
