"""Bytes that a rank holds for parameters, gradients and optimizer state, beside the formulas of the ZeRO paper."""

import json
from dataclasses import dataclass

from benchmarks.launch import torchrun

WORKERS = (1, 2, 4)


@dataclass(frozen=True)
class Bytes:
    """For each parameter of the model."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """The sum of all three."""
        return self.parameters + self.gradients + self.optimizer

    def __str__(self) -> str:
        return f"{self.parameters:.2f} + {self.gradients:.2f} + {self.optimizer:.2f} = {self.total:.2f}"


@dataclass(frozen=True)
class Holding:
    """The memory of one rank of a plan."""

    stage: int
    workers: int
    accumulation: int
    """Micro-batches whose gradients are added up."""
    held: Bytes
    other_bytes: int
    """Bytes of all other tensors in the process."""

    @property
    def expected(self) -> Bytes:
        """The bytes by the paper, with 4-byte sums if gradients are accumulated."""
        return paper(self.stage, self.workers, gradient_bytes=4 if self.accumulation > 1 else 2)

    @property
    def difference(self) -> float:
        """(held - expected) / expected."""
        return self.held.total / self.expected.total - 1


def paper(stage: int, workers: int, gradient_bytes: int = 2) -> Bytes:
    """Return 2 for bf16 parameters, ``gradient_bytes``, and 12 for AdamW in float32. A stage divides its parts.

    Source: Rajbhandari et al. 2020, arXiv:1910.02054, figure 1 and section 5, with K = 12.
    """
    parameters, gradients, optimizer = (workers if stage >= least else 1 for least in (3, 2, 1))
    return Bytes(2 / parameters, gradient_bytes / gradients, 12 / optimizer)


def measure_memory() -> list[Holding]:
    """ZeRO 0 to 3 on 1, 2 and 4 workers."""
    return [holding for workers in WORKERS for holding in _measure(workers)]


def _measure(workers: int) -> list[Holding]:
    print(f"memory on {workers} workers", flush=True)
    lines = torchrun(workers, "benchmarks.training.memory_worker").splitlines()
    return [_read(workers, *json.loads(line.removeprefix("HELD "))) for line in lines if line.startswith("HELD ")]


def _read(workers: int, stage: int, accumulation: int, num_parameters: int, *sizes: int) -> Holding:
    *held, other = sizes
    return Holding(stage, workers, accumulation, Bytes(*(item / num_parameters for item in held)), other)
