"""The most memory that a rank ever holds beside what ZeRO says: python -m benchmarks.training.peak [SIZE …]

Prints a table; that in MEMORY.md was made with it.
"""

import json
import sys
from dataclasses import dataclass

from benchmarks.launch import torchrun
from benchmarks.training.memory import paper

WORKERS = 2
GIB = 2**30
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""Has glibc give back what is freed: by default it keeps blocks of up to 32 MB, which are no part of ZeRO."""
_MACHINE_BYTES = 21 * GIB
"""What all ranks may take."""


@dataclass(frozen=True)
class Size:
    """Of a GPT."""

    layers: int
    width: int
    num_parameters: float


SIZES = {"0.1B": Size(12, 768, 0.0975e9), "0.35B": Size(26, 1024, 0.344e9), "0.7B": Size(24, 1536, 0.705e9)}


@dataclass(frozen=True)
class Peak:
    """Of the rank that held most."""

    size: str
    stage: int
    num_parameters: int
    made: int
    """Bytes until the engine was there."""
    trained: int
    """Bytes until the first step was done."""

    def row(self) -> str:
        """Of the table."""
        says = paper(self.stage, WORKERS).total * self.num_parameters
        return (
            f"| {self.size} | {self.stage} | {says / GIB:.2f} | {self.made / GIB:.2f} | {self.trained / GIB:.2f} | "
            f"{self.trained / says:.2f} |"
        )


def main() -> None:
    """Measure the sizes that are named, or all."""
    print("| parameters | ZeRO | ZeRO says, GiB | peak until the engine is made | peak of the step | step / ZeRO |")
    print("| --- | --- | --- | --- | --- | --- |")
    for size in sys.argv[1:] or SIZES:
        for stage in range(4):
            if WORKERS * 1.2 * paper(stage, WORKERS).total * SIZES[size].num_parameters > _MACHINE_BYTES:
                print(f"| {size} | {stage} | more than this machine has | | | |", flush=True)
            else:
                print(_measure(size, stage).row(), flush=True)


def _measure(size: str, stage: int) -> Peak:
    lines = torchrun(WORKERS, "benchmarks.training.peak_worker", size, str(stage), **_ENVIRONMENT).splitlines()
    (found,) = (json.loads(line.removeprefix("PEAK ")) for line in lines if line.startswith("PEAK "))
    return Peak(size, stage, *found)


if __name__ == "__main__":
    main()
