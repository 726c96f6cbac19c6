"""Train over networks of 20 Mbit/s to 1 Gbit/s, with and without less traffic. Write RESULTS.md and steps.svg."""

import argparse
import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.machine import Conditions, machine, versions
from benchmarks.network.cases import CASES, LOSS_CASES, RATES
from benchmarks.network.machines import Measured, measure, two_machines
from benchmarks.network.plot import lines
from benchmarks.network.rank import ALL_REDUCE
from benchmarks.network.report import LOSS, LOSS_STEPS, REDUCTIONS, Findings, Found, report

RESULTS, PLOT = Path(__file__).with_name("RESULTS.md"), Path(__file__).with_name("steps.svg")
_PARTS = (*(rate.name for rate in RATES), LOSS, REDUCTIONS)
_REDUCTIONS_TIMES = 2


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the chosen parts, keep the measurements, and write the page once all parts have been measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="*", choices=_PARTS, default=list(_PARTS), help="default: all; none: report")
    parser.add_argument("--measured", type=Path, help="file that keeps the measurements between runs")
    arguments = parser.parse_args(argv)
    kept = json.loads(arguments.measured.read_text()) if arguments.measured and arguments.measured.exists() else {}
    found: Found = {part: [[Measured(**one) for one in round_] for round_ in kept[part]] for part in kept}
    conditions = Conditions()
    for _ in range(arguments.rounds if arguments.parts else 0):
        for part in arguments.parts:
            if part not in (LOSS, REDUCTIONS) or part not in found:
                found.setdefault(part, []).append(_measure(part))
                print(part, *found[part][-1], sep="\n", flush=True)
                if arguments.measured:
                    text = json.dumps({part: [[asdict(one) for one in r] for r in found[part]] for part in found})
                    arguments.measured.write_text(text, encoding="utf-8")
    if set(found) == set(_PARTS):
        header = f"{machine()}; {versions(['torch', 'deepspeed'])}; revision {_revision()}; {conditions}"
        findings = Findings(found, header)
        RESULTS.write_text(report(findings), encoding="utf-8")
        PLOT.write_text(lines([rate.name for rate in RATES], findings.steps_per_s()), encoding="utf-8")
        print(RESULTS.read_text(encoding="utf-8"))


def _revision() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _measure(part: str) -> list[Measured]:
    with two_machines() as machines:
        if part == LOSS:
            return measure(machines, RATES[0], LOSS_CASES, LOSS_STEPS)
        if part == REDUCTIONS:
            return [
                replace(one, case=f"{one.case}, {rate.name}")
                for rate in RATES
                for one in measure(machines, rate, [ALL_REDUCE], _REDUCTIONS_TIMES, per_machine=2)
            ]
        rate = next(rate for rate in RATES if rate.name == part)
        return measure(machines, rate, list(CASES), rate.steps)


if __name__ == "__main__":
    main()
