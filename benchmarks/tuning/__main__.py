"""Race Rayloom's search against its peers, and write RESULTS.md: python -m benchmarks.tuning [--seeds N]"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import optuna

from app.tuning.space import load_space
from benchmarks.tuning.cases import CASES, Case
from benchmarks.tuning.contenders import CONTENDERS
from benchmarks.tuning.curves import Curves
from benchmarks.tuning.race import Race, run_race
from benchmarks.tuning.report import Comparison, report

RESULTS = Path(__file__).with_name("RESULTS.md")


def main() -> None:
    """Run every race, print what came out and keep it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="repeats of each search")
    parser.add_argument("--cases", nargs="*", default=[each.name for each in CASES], help="names of cases")
    parser.add_argument("--curves", type=Path, help="folder of learning curves, kept for the next time")
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-tuning-") as temporary:
        folder = arguments.curves or Path(temporary)
        cases = [each for each in CASES if each.name in arguments.cases]
        comparisons = [_compare(each, arguments.seeds, folder / each.name.split(",")[0]) for each in cases]
    text = report(comparisons, (time.monotonic() - began) / 60)
    RESULTS.write_text(text, encoding="utf-8")
    print(text)


def _compare(case: Case, seeds: int, folder: Path) -> Comparison:
    recipe, curves = case.recipe(), Curves(case.recipe(), folder)
    space = load_space(case.space, recipe)
    races: dict[str, list[Race]] = {name: [] for name in CONTENDERS}
    for seed in range(seeds):
        for name, create in CONTENDERS.items():
            np.random.seed(seed)  # Ray Tune draws brackets from it
            races[name].append(run_race(create(space, recipe, seed), curves, case.epochs, case.budget))
            curves.close()  # a trial that was left holds the screen
            print(f"{case.name}, seed {seed}, {name}: {races[name][-1].best[-1]:.4f}", flush=True)
    return Comparison(case, races)


if __name__ == "__main__":
    main()
