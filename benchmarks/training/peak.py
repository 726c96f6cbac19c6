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
_HEADER = (
    "parameters", "plan", "formula, GiB", "peak of creation, GiB", "peak of two steps, GiB", "steps / formula",
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


PLANS: dict[str, dict[str, int]] = {f"ZeRO {stage}": {"zero_stage": stage} for stage in range(4)}
PLANS |= {"tensor 2": {"tensor": 2}, "pipeline 2": {"pipeline": 2}}


@dataclass(frozen=True)
class Peak:
    """Peak memory of the rank that held most."""

    size: str
    plan: str
    num_parameters: int
    """Parameters of the whole model."""
    made: int
    """Peak in bytes until the engine was created."""
    trained: int
    """Peak in bytes until two steps were done."""

    def row(self) -> tuple[str, ...]:
        """Return the row of the table."""
        formula = bytes_per_parameter(self.plan) * self.num_parameters
        gibibytes = (f"{size / GIB:.2f}" for size in (formula, self.made, self.trained))
        return self.size, self.plan, *gibibytes, f"{self.trained / formula:.2f}"


def bytes_per_parameter(plan: str) -> float:
    """Return the formula's bytes on each rank, per parameter of the whole model.

    For a tensor or pipeline plan, each rank holds an equal part of the model, and ZeRO has nothing to split.
    """
    stage = PLANS[plan].get("zero_stage")
    return paper(0, 1).total / WORKERS if stage is None else paper(stage, WORKERS).total


def main() -> None:
    """Measure the sizes given as arguments, or all."""
    rows = [_row(size, plan) for size in sys.argv[1:] or SIZES for plan in PLANS]
    print(table(_HEADER, rows))


def _row(size: str, plan: str) -> tuple[str, ...]:
    if WORKERS * 1.2 * bytes_per_parameter(plan) * SIZES[size].num_parameters > _MACHINE_BYTES:
        return size, plan, "more than this machine has", "", "", ""
    peak = _measure(size, plan)
    print(peak, flush=True)
    return peak.row()


def _measure(size: str, plan: str) -> Peak:
    lines = torchrun(WORKERS, "benchmarks.training.peak_worker", size, plan).splitlines()
    (found,) = (json.loads(line.removeprefix("PEAK ")) for line in lines if line.startswith("PEAK "))
    return Peak(size, plan, *found)


if __name__ == "__main__":
    main()
