"""Peak memory of a rank, compared with the formula of ZeRO: python -m benchmarks.training.peak [SIZE …]

Prints the table of MEMORY.md.
"""

import json
import sys
from dataclasses import dataclass

from benchmarks.launch import torchrun
from benchmarks.markdown import table
from benchmarks.training.memory import paper

WORKERS = 2
GIB = 2**30
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""Makes glibc return freed memory. By default it keeps blocks of up to 32 MB, which are no part of ZeRO."""
_HEADER = (
    "parameters", "ZeRO stage", "formula, GiB", "peak of creation, GiB", "peak of first step, GiB", "step / formula",
)  # fmt: skip
_MACHINE_BYTES = 21 * GIB
"""Memory that all ranks together may use."""


@dataclass(frozen=True)
class Size:
    """Size of a GPT."""

    layers: int
    width: int
    num_parameters: float


SIZES = {"0.1B": Size(12, 768, 0.0975e9), "0.35B": Size(26, 1024, 0.344e9), "0.7B": Size(24, 1536, 0.705e9)}


@dataclass(frozen=True)
class Peak:
    """Peak memory of the rank that held most."""

    size: str
    stage: int
    num_parameters: int
    made: int
    """Peak in bytes until the engine was created."""
    trained: int
    """Peak in bytes until the first step was done."""

    def row(self) -> tuple[str, ...]:
        """Return the row of the table."""
        formula = paper(self.stage, WORKERS).total * self.num_parameters
        gibibytes = (f"{size / GIB:.2f}" for size in (formula, self.made, self.trained))
        return self.size, str(self.stage), *gibibytes, f"{self.trained / formula:.2f}"


def main() -> None:
    """Measure the sizes given as arguments, or all."""
    rows = [_row(size, stage) for size in sys.argv[1:] or SIZES for stage in range(4)]
    print(table(_HEADER, rows))


def _row(size: str, stage: int) -> tuple[str, ...]:
    if WORKERS * 1.2 * paper(stage, WORKERS).total * SIZES[size].num_parameters > _MACHINE_BYTES:
        return size, str(stage), "more than this machine has", "", "", ""
    peak = _measure(size, stage)
    print(peak, flush=True)
    return peak.row()


def _measure(size: str, stage: int) -> Peak:
    lines = torchrun(WORKERS, "benchmarks.training.peak_worker", size, str(stage), **_ENVIRONMENT).splitlines()
    (found,) = (json.loads(line.removeprefix("PEAK ")) for line in lines if line.startswith("PEAK "))
    return Peak(size, stage, *found)


if __name__ == "__main__":
    main()
