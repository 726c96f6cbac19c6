"""The races of benchmarks/tuning, on curves that are known."""

from typing import Any

import pytest

from app.tuning.space import load_space
from benchmarks.tuning.cases import CASES
from benchmarks.tuning.contenders import CONTENDERS, RANDOM, RAYLOOM
from benchmarks.tuning.race import Race, run_race
from benchmarks.tuning.report import Comparison, report

CASE = CASES[0]


class Known:
    """Curves that rise to what the learning rate is worth, best near 0.01, and say so early."""

    def value(self, values: dict[str, Any], epoch: int) -> float | None:
        worth = 1.0 / (1.0 + abs(values["train.optimizer.lr"] - 0.01) / 0.01)
        return worth * (1.0 - 0.5**epoch) if values["train.optimizer.lr"] < 0.3 else None


@pytest.mark.parametrize("name", list(CONTENDERS))
def test_a_contender_spends_its_budget_and_no_more(name: str) -> None:
    recipe = CASE.recipe()
    contender = CONTENDERS[name](load_space(CASE.space, recipe), recipe, 0)
    race = run_race(contender, Known(), CASE.epochs, budget=60)
    assert len(race.best) == 60
    assert race.best == sorted(race.best)
    assert (race.trials > 5) is name.startswith(("Rayloom", "Ray Tune"))  # Optuna prunes none of its first five


def test_the_report_counts_epochs_to_the_random_value() -> None:
    races = {name: [Race([0.5, 0.6, 0.7, 0.9], trials=2)] for name in CONTENDERS}
    races[RAYLOOM] = [Race([0.9, 0.9, 0.9, 0.95], trials=3)]
    comparison = Comparison(CASE, races)
    assert comparison.shares(RAYLOOM) == [1 / CASE.budget]
    assert comparison.shares(RANDOM) == [4 / CASE.budget]
    text = report([comparison], minutes=1.0)
    assert "| digits | final value, beside the best peer's | ≥ 0.9000 | 0.9500 | reached |" in text
