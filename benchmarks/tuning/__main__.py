"""Race Rayloom's search against its peers, measure what a trial costs beside its training, and write RESULTS.md."""

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from benchmarks.machine import Conditions
from benchmarks.tuning.cases import CASES, Case
from benchmarks.tuning.overhead import measure_overhead
from benchmarks.tuning.race import Race
from benchmarks.tuning.repeat import Repeat
from benchmarks.tuning.report import Comparison, Findings, report

RESULTS = Path(__file__).with_name("RESULTS.md")
_NAMES = [case.name for case in CASES]


def main() -> None:
    """Run what was asked for, print what came out and keep it."""
    arguments = _arguments()
    conditions = Conditions()
    overhead = None if arguments.no_overhead else measure_overhead()
    with tempfile.TemporaryDirectory(prefix="bench-tuning-") as temporary:
        cases = [case for case in CASES if case.name in arguments.cases]
        comparisons = _compare(cases, arguments.repeats, arguments.curves or Path(temporary))
    text = report(Findings(comparisons, overhead, conditions))
    arguments.results.write_text(text, encoding="utf-8")
    print(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="of each search, with seeds 0, 1, …")
    parser.add_argument("--cases", nargs="+", choices=_NAMES, default=_NAMES, help="default: all")
    parser.add_argument("--curves", type=Path, help="folder of learning curves, kept for the next time")
    parser.add_argument("--no-overhead", action="store_true", help="without the search on a Ray cluster")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to write")
    return parser.parse_args()


def _compare(cases: Sequence[Case], repeats: int, folder: Path) -> list[Comparison]:
    """Every repeat of every case, each in a process with one thread, as many at once as there are cores."""
    began = time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"
    races: dict[str, dict[int, dict[str, Race]]] = {case.name: {} for case in cases}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), spawn) as pool:
        waiting = {}
        for case in cases:
            recipe = case.recipe(folder / case.name)
            for seed in range(repeats):
                repeat = Repeat(case, recipe, seed, folder / case.name)
                waiting[pool.submit(repeat.run)] = repeat
        for number, done in enumerate(as_completed(waiting), start=1):
            races[waiting[done].case.name][waiting[done].seed] = done.result()
            print(f"{number} of {len(waiting)} repeats, {(time.monotonic() - began) / 60:.0f} minutes", flush=True)
    return [Comparison(case, [races[case.name][seed] for seed in range(repeats)]) for case in cases]


if __name__ == "__main__":
    main()
