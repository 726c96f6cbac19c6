"""Measure Rayloom's endpoint beside other model servers, and write RESULTS.md: python -m benchmarks.serving"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import load_average
from benchmarks.serving.cases import CASES, Case
from benchmarks.serving.environments import DEFAULT_FOLDER
from benchmarks.serving.findings import Findings, Raced
from benchmarks.serving.models import Models, Workshop
from benchmarks.serving.peers import EAGER, SERVERS, version_in
from benchmarks.serving.plot import heat_map
from benchmarks.serving.race import race
from benchmarks.serving.report import report
from benchmarks.serving.sweep import Swept, sweep
from benchmarks.serving.workloads import workload
from benchmarks.serving.wrk import WrkMissingError, require_wrk

RESULTS = Path(__file__).with_name("RESULTS.md")
_SWEEP = "sweep"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is asked for, print what was found and keep it."""
    arguments = _arguments(argv)
    try:
        require_wrk()
    except WrkMissingError as error:
        sys.exit(f"error: {error}")
    began, load_before = time.monotonic(), load_average()
    versions = sorted({version_in(each, arguments.peers) for each in (*SERVERS, EAGER)})  # installs what is not there
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as temporary:
        models = Workshop(arguments.models or Path(temporary)).make()
        races = {
            name: _race(CASES[name](models, arguments.peers), arguments.only, arguments.rounds, arguments.seconds)
            for name in arguments.cases
            if name != _SWEEP
        }
        swept = _sweep(models, arguments.seconds) if _SWEEP in arguments.cases else None
    minutes = (time.monotonic() - began) / 60
    settings = (arguments.rounds, arguments.seconds)
    found = Findings(races, swept, versions, *settings, load_before, load_average(), minutes)
    text = report(found, picture := arguments.output.with_name("sweep.svg"))
    if swept and swept.outcomes:
        picture.write_text(heat_map(swept.outcomes), encoding="utf-8")
    arguments.output.write_text(text, encoding="utf-8")
    print(text)


def _race(case: Case, only: Sequence[str], num_rounds: int, seconds: float) -> Raced:
    contenders = [each for each in case.contenders if not only or each.name in only]
    return Raced(case.title, case.peer_names, race(contenders, case.workload, case.loops, num_rounds, seconds))


def _sweep(models: Models, seconds: float) -> Swept:
    return sweep(models.chosen, workload(models.encoder.onnx, models.short_texts), seconds)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    names = [*CASES, _SWEEP]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="NAME", help="servers, as the report names them; default: all"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each server")
    parser.add_argument("--seconds", type=float, default=5.0, help="of load at each number of connections")
    parser.add_argument("--models", type=Path, help="folder of compiled models, kept for the next time")
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, help="folder of the peers' environments")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file that is written")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
