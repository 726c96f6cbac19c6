"""The races of benchmarks/tuning, on curves that are known."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from app.errors import TuningError
from app.tuning.outcome import TuneMetrics
from app.tuning.space import load_space
from benchmarks.machine import Conditions
from benchmarks.tuning.cases import CASES
from benchmarks.tuning.contenders import CONTENDERS, RANDOM, RAYLOOM
from benchmarks.tuning.overhead import Window, fit, timed, turns_in
from benchmarks.tuning.race import Race, run_race
from benchmarks.tuning.report import Comparison, Findings, report
from tests.examples import read_examples

CASE = CASES[0]


class Known:
    """Curves that rise to what the learning rate is worth, best near 0.01, and say so early."""

    def value(self, values: dict[str, Any], epoch: int) -> float | None:
        worth = 1.0 / (1.0 + abs(values["train.optimizer.lr"] - 0.01) / 0.01)
        return worth * (1.0 - 0.5**epoch) if values["train.optimizer.lr"] < 0.3 else None


@pytest.mark.parametrize("name", list(CONTENDERS))
def test_a_contender_spends_its_budget_and_no_more(name: str, tmp_path: Path) -> None:
    recipe = CASE.recipe(tmp_path)
    contender = CONTENDERS[name](load_space(CASE.space, recipe), recipe, 0)
    race = run_race(contender, Known(), CASE.epochs, budget=60)
    assert len(race.best) == 60
    assert race.best == sorted(race.best)
    assert (race.trials > 5) is name.startswith(("Rayloom", "Ray Tune"))  # Optuna prunes none of its first five


@pytest.mark.parametrize("budget", [1, 7, 60])
def test_rayloom_is_counted_by_what_a_search_of_so_many_epochs_gives_back(budget: int, tmp_path: Path) -> None:
    recipe = CASE.recipe(tmp_path)
    contender: Any = CONTENDERS[RAYLOOM](load_space(CASE.space, recipe), recipe, 0)
    race = run_race(contender, Known(), CASE.epochs, budget)
    for number in contender.study.open_trials:
        contender.study.prune(number, "tune.stop.epochs")
    assert TuneMetrics.of(contender.study, ["val_accuracy"], None).best_value == race.best[-1]


def test_short_reviews_are_a_source_named_by_its_content(tmp_path: Path) -> None:
    case = CASES[1]
    data = case.recipe(tmp_path).data
    assert case.recipe(tmp_path).data == data
    texts, labels = zip(*read_examples(data), strict=True)
    assert len(texts) > 5000
    assert max(map(len, texts)) <= 32
    assert set(labels) == {"positive", "negative"}


def test_the_report_counts_epochs_to_the_random_value() -> None:
    races = {name: Race([0.5, 0.6, 0.7, 0.9], trials=2) for name in CONTENDERS}
    races[RAYLOOM] = Race([0.9, 0.9, 0.9, 0.95], trials=3)
    comparison = Comparison(CASE, [races])
    assert comparison.shares(RAYLOOM) == [1 / CASE.budget]
    assert comparison.shares(RANDOM) == [4 / CASE.budget]
    text = report(Findings([comparison], None, Conditions()))
    assert "| digits | final value, beside the best peer's | ≥ 0.9000 | 0.9500 | reached |" in text
    assert "Overhead" not in text


def test_the_overhead_is_what_a_turn_takes_beside_its_epochs() -> None:
    sizes = [(1, 1), (1, 1), (2, 4), (1, 1), (2, 4), (1, 1)]
    off = [0.1, -0.1, 0.1, 0.1, -0.1, -0.1]  # at right angles to turns and epochs, so that both stay
    windows = [
        Window(turns, epochs, 0.7 * turns + 0.5 * epochs + error)
        for (turns, epochs), error in zip(sizes, off, strict=True)
    ]
    overhead = fit(windows)
    assert overhead.per_turn.value == pytest.approx(0.7)
    assert overhead.per_epoch.value == pytest.approx(0.5)
    # Student's t of 4 degrees of freedom, 2.7764; residuals 0.06 / 4; the sums of squares 12, 36 and products 20
    assert overhead.per_turn.margin == pytest.approx(2.7764 * (0.015 * 36 / (12 * 36 - 20**2)) ** 0.5, rel=1e-4)
    assert overhead.per_epoch.margin == pytest.approx(2.7764 * (0.015 * 12 / (12 * 36 - 20**2)) ** 0.5, rel=1e-4)
    races = {name: Race([0.5], trials=1) for name in CONTENDERS}
    text = report(Findings([Comparison(CASE, [races])], overhead, Conditions()))
    assert "| digits, on Ray | overhead of a trial | ≤ 1.5 s | 0.70 ± 0.36 s | reached |" in text
    assert "6 more, with 8 turns and 12 epochs" in text


@pytest.mark.parametrize("windows", [[Window(1, 1, 2.0), Window(2, 4, 5.0)], [Window(1, 1, 2.0)] * 4])
def test_turns_and_epochs_of_too_few_trials_cannot_be_told_apart(windows: list[Window]) -> None:
    with pytest.raises(TuningError, match="cannot be told apart"):
        fit(windows)


def test_a_trial_is_timed_until_the_next_one_starts() -> None:
    printed = """
study one in sqlite:////studies/one.db, 1 trials at once
trial  state     epochs   val_accuracy    values
    0  paused       1/4       0.777778    lr=0.003
    1  paused       1/4       0.8         lr=0.004
    1  running      2/4       0.85        lr=0.004
    1  complete     4/4       0.9 *       lr=0.004
    2  paused       1/4       0.219444    lr=0.199
    3  paused       1/4       0.219444    lr=0.2
    0  pruned       1/4       0.777778    lr=0.003
"""
    turns = turns_in(printed.splitlines())
    assert turns == [(0, 1), (1, 1), (1, 4), (2, 1), (3, 1)]
    table = pd.DataFrame(
        {
            "trial": [0, 1, 2, 3],
            "state": ["pruned", "complete", "pruned", "pruned"],
            "failures": 0,
            "began": pd.to_datetime([0.0, 9.0, 12.5, 14.0], unit="s"),
        }
    )
    assert timed(table, turns) == [Window(2, 4, 3.5), Window(1, 1, 1.5)]
    with pytest.raises(TuningError, match=r"trials \[2\]"):
        timed(table.assign(failures=[0, 0, 1, 0]), turns)
