"""Measure training beside its peers, and write RESULTS.md: python -m benchmarks.training [--rounds N]"""

import argparse
import time
from pathlib import Path

from benchmarks.machine import load_average, versions
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
    began, load_before = time.monotonic(), load_average()
    comparisons = [compare(case, arguments.rounds) for case in CASES]
    holdings = measure_memory()
    minutes = (time.monotonic() - began) / 60
    text = report(Findings(comparisons, holdings, versions(PACKAGES), load_before, load_average(), minutes))
    RESULTS.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
