"""The races of benchmarks/tuning, on curves that are known."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from app.data.sources import load_examples
from app.errors import TuningError
from app.tuning.outcome import TuneMetrics
from app.tuning.space import load_space
from benchmarks.tuning.cases import CASES
from benchmarks.tuning.contenders import CONTENDERS, RANDOM, RAYLOOM
from benchmarks.tuning.overhead import TimedTrial, fit, timed
from benchmarks.tuning.race import Race, run_race
from benchmarks.tuning.report import Comparison, Findings, report

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
    contender.study.end_running("tune.stop.epochs")
    assert TuneMetrics.of(contender.study, ["val_accuracy"], None).best_value == race.best[-1]


def test_short_reviews_are_a_source_named_by_its_content(tmp_path: Path) -> None:
    case = CASES[1]
    data = case.recipe(tmp_path).data
    assert case.recipe(tmp_path).data == data
    examples = load_examples(data)
    assert len(examples) > 5000
    assert max(map(len, examples.inputs)) <= 32
    assert set(examples.labels) == {"positive", "negative"}


def test_the_report_counts_epochs_to_the_random_value() -> None:
    races = {name: Race([0.5, 0.6, 0.7, 0.9], trials=2) for name in CONTENDERS}
    races[RAYLOOM] = Race([0.9, 0.9, 0.9, 0.95], trials=3)
    comparison = Comparison(CASE, [races])
    assert comparison.shares(RAYLOOM) == [1 / CASE.budget]
    assert comparison.shares(RANDOM) == [4 / CASE.budget]
    text = report(Findings([comparison], None, load_before="0.1, 0.1, 0.1", minutes=1.0))
    assert "| digits | final value, beside the best peer's | ≥ 0.9000 | 0.9500 | reached |" in text
    assert "Overhead" not in text


def test_the_overhead_is_where_the_line_through_the_trials_begins() -> None:
    off = {1: 0.1, 2: -0.2, 3: 0.1}  # at right angles to the line, so that it stays
    trials = [TimedTrial(epochs, 0.7 + 0.5 * epochs + off[epochs]) for epochs in off] * 4
    overhead = fit(trials)
    assert overhead.per_trial.value == pytest.approx(0.7)
    assert overhead.per_epoch.value == pytest.approx(0.5)
    # Student's t of 10 degrees of freedom, 2.2281, times the standard errors: residuals 0.24 / 10, epochs 8 and 56 / 12
    assert overhead.per_epoch.margin == pytest.approx(2.2281 * (0.024 / 8) ** 0.5, rel=1e-4)
    assert overhead.per_trial.margin == pytest.approx(2.2281 * (0.024 / 8 * 56 / 12) ** 0.5, rel=1e-4)
    races = {name: Race([0.5], trials=1) for name in CONTENDERS}
    text = report(Findings([Comparison(CASE, [races])], overhead, load_before="0.1, 0.1, 0.1", minutes=1.0))
    assert "| digits, on Ray | overhead of a trial | ≤ 1.5 s | 0.70 ± 0.26 s | reached |" in text
    assert "4 × 1 and 4 × 2 and 4 × 3 epochs" in text


@pytest.mark.parametrize("epochs", [(1, 3), (2, 2, 2, 2)])
def test_no_line_goes_through_too_few_trials_or_lengths(epochs: tuple[int, ...]) -> None:
    with pytest.raises(TuningError, match="no line goes through"):
        fit([TimedTrial(each, 1.0 + each) for each in epochs])


def test_a_trial_is_timed_until_the_next_one_starts() -> None:
    table = pd.DataFrame(
        {
            "trial": [0, 1, 2, 3],
            "state": "complete",
            "failures": 0,
            "epochs": [1, 3, 1, 3],
            "began": pd.to_datetime([0.0, 9.0, 12.5, 14.0], unit="s"),
        }
    )
    assert timed(table) == [TimedTrial(3, 3.5), TimedTrial(1, 1.5)]
    with pytest.raises(TuningError, match=r"trials \[2\]"):
        timed(table.assign(failures=[0, 0, 1, 0]))
