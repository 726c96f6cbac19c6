"""Measure Rayloom's endpoint beside other model servers, and write RESULTS.md: python -m benchmarks.serving"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import Conditions
from benchmarks.serving.cases import CASES, STEADY_CASES, Case, Field
from benchmarks.serving.environments import DEFAULT_FOLDER, InstallationError, version_of
from benchmarks.serving.findings import Findings, Raced
from benchmarks.serving.h2load import H2LOAD
from benchmarks.serving.load import GeneratorMissingError
from benchmarks.serving.models import Models
from benchmarks.serving.plot import heat_map
from benchmarks.serving.race import race
from benchmarks.serving.report import report
from benchmarks.serving.servers import SERVERS
from benchmarks.serving.steady import steady
from benchmarks.serving.sweep import Swept, sweep
from benchmarks.serving.workloads import workload
from benchmarks.serving.wrk import WRK

RESULTS = Path(__file__).with_name("RESULTS.md")
_GRPC, _SWEEP, _STEADY_S = "grpc", "sweep", 15


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is asked for, print what was found and keep it."""
    arguments = _arguments(argv)
    try:
        for case in arguments.cases:
            (H2LOAD if case == _GRPC else WRK).require()
        with tempfile.TemporaryDirectory(prefix="bench-serving-") as temporary:
            found = _measure(arguments, (arguments.models or Path(temporary)).absolute())
    except (GeneratorMissingError, InstallationError) as error:
        sys.exit(f"error: {error}")
    picture = arguments.output.with_name("sweep.svg")
    if found.sweep and found.sweep.outcomes:
        picture.write_text(heat_map(found.sweep.outcomes), encoding="utf-8")
    text = report(found, picture)
    arguments.output.write_text(text, encoding="utf-8")
    print(text)


def _measure(arguments: argparse.Namespace, folder: Path) -> Findings:
    """Every case that is asked for, with the peers that are asked for."""
    conditions = Conditions()
    field = Field([SERVERS[name] for name in arguments.peers], arguments.environments)
    versions = sorted(
        {version_of(server, field.environments) for server in field.servers}
    )  # installs what is not there
    models = Models(folder)
    races = {
        name: _race(CASES[name](models, field), arguments.rounds, arguments.seconds)
        for name in arguments.cases
        if name in CASES
    }
    steadily = [
        steady(STEADY_CASES[name](models, field), arguments.rounds, _STEADY_S)
        for name in arguments.cases
        if name in STEADY_CASES
    ]
    swept = _sweep(models, arguments.seconds) if _SWEEP in arguments.cases else None
    return Findings(races, swept, steadily, versions, arguments.rounds, arguments.seconds, conditions)


def _race(case: Case, num_rounds: int, seconds: int) -> Raced:
    names = [peer.name for peer in case.peers]
    alone = [peer.name for peer in case.peers if not peer.joins]
    ran = race([*case.own, *case.peers], case.workload, case.loops, num_rounds, seconds)
    return Raced(case.title, names, alone, ran)


def _sweep(models: Models, seconds: int) -> Swept:
    return sweep(models.chosen, workload(models.encoder.onnx, models.short_texts), seconds)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    cases, peers = [*CASES, *STEADY_CASES, _SWEEP], list(SERVERS)
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases, help="default: all")
    parser.add_argument("--peers", nargs="*", choices=peers, default=peers, help="default: all")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each server")
    parser.add_argument("--seconds", type=int, default=2, help="of load; twice as many at 64 connections")
    parser.add_argument("--models", type=Path, help="folder of compiled models, kept for the next time")
    parser.add_argument("--environments", type=Path, default=DEFAULT_FOLDER, help="folder of what peers run in")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file that is written")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
