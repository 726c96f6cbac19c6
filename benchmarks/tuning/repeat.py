"""One repeat of a case: every contender once, with the same seed, on the same curves."""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optuna

from app.config import Recipe
from app.tuning.space import load_space
from benchmarks.tuning.cases import Case
from benchmarks.tuning.contenders import CONTENDERS, RANDOM
from benchmarks.tuning.curves import Curves
from benchmarks.tuning.race import Race, run_race


@dataclass(frozen=True)
class Repeat:
    """The arguments of one process. No two propose the same configuration, because their seeds differ."""

    case: Case
    recipe: Recipe
    seed: int
    folder: Path
    """The folder of the case's curves."""

    def run(self) -> dict[str, Race]:
        """The race of each contender, by name; a line is printed as each ends."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        space, curves = load_space(self.case.space, self.recipe), Curves(self.recipe, self.folder)
        races: dict[str, Race] = {}
        for name in sorted(CONTENDERS, key=lambda name: name != RANDOM):  # it trains to the end what others try too
            began = time.monotonic()
            np.random.seed(self.seed)  # Ray Tune draws brackets from it
            contender = CONTENDERS[name](space, self.recipe, self.seed)
            race = races[name] = run_race(contender, curves, self.case.epochs, self.case.budget)
            curves.close()  # a trial that was left holds the screen
            print(
                f"{self.case.name}, seed {self.seed}, {name}: {race.best[-1]:.4f} after {len(race.best)} epochs of "
                f"{race.trials} trials, {time.monotonic() - began:.0f} s",
                flush=True,
            )
        return {name: races[name] for name in CONTENDERS}
