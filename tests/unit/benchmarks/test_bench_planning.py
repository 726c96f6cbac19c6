"""The planner against published runs."""

from statistics import median

import numpy as np
import pytest

from app.planner.validation import validation_of
from benchmarks.planning.accuracy import accuracy_goals, held_out, memory_errors, time_errors
from benchmarks.planning.published import EARLIER_TABLE, LATER_TABLE, published_runs


def test_every_published_run_names_its_source_and_split() -> None:
    runs = published_runs()
    assert len(runs) == 422
    assert len(held_out()) == 218
    assert all(run.row["url"] and run.row["split"] in ("tuning", "held-out") for run in runs)


def test_the_error_that_a_table_states_is_that_of_the_published_runs() -> None:
    for kind in ("a100", "h100"):
        runs = [run for run in held_out() if run.device.name.startswith(kind)]
        errors = time_errors(runs).all
        stated = validation_of(runs[0].device)
        assert stated is not None
        assert stated.runs == len(runs)
        assert stated.median == pytest.approx(median(errors), abs=0.005)
        assert stated.p90 == pytest.approx(float(np.percentile(errors, 90)), abs=0.005)


def test_runs_that_nothing_was_fitted_on_are_predicted_too() -> None:
    runs = [run for run in published_runs(LATER_TABLE) if run.memory]
    assert len(runs) == 17
    used, times = memory_errors(runs), time_errors(runs)
    assert median(used.all) < 0.03
    assert min(used.by_source["bigscience"]) > -0.05
    assert median(times.all) < 0.05


def test_memory_of_one_or_two_copies_is_not_far_too_low() -> None:
    runs = published_runs(EARLIER_TABLE)
    assert len(runs) == 29
    used = memory_errors(runs)
    assert median(used.all) < 0.04
    assert min(used.by_source["bigscience"]) > -0.11


def test_goals_on_published_runs_that_were_reached_stay_reached() -> None:
    goals = {goal.what: goal for goal in accuracy_goals()}
    for what in (
        "held-out step time, mean of the sources' medians",
        "held-out step time, 90th percentile",
        "peak memory, median",
        "step time lost by the chosen plan, median",
        "step time lost by the chosen plan, 90th percentile",
    ):
        assert goals[what].verdict == "reached", goals[what]
