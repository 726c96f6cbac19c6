"""Measure training beside its peers, and write RESULTS.md: python -m benchmarks.training [--rounds N]"""

import argparse
from pathlib import Path

from benchmarks.machine import Conditions, versions
from benchmarks.training.cases import CASES
from benchmarks.training.memory import measure_memory
from benchmarks.training.report import Findings, report
from benchmarks.training.throughput import compare

PACKAGES = ("rayloom", "torch", "deepspeed", "accelerate")
RESULTS = Path(__file__).with_name("RESULTS.md")


def main() -> None:
    """Measure everything, print what was found and keep it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each contender in each case")
    arguments = parser.parse_args()
    conditions = Conditions()
    comparisons = [compare(case, arguments.rounds) for case in CASES]
    holdings = measure_memory()
    text = report(Findings(comparisons, holdings, versions(PACKAGES), conditions))
    RESULTS.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
