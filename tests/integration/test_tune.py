"""A search on a cluster, and the recipe that comes out. What it survives is in tests/faults."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import pytest
from optuna.trial import TrialState

from app.config import load_recipe
from app.ports import is_free, unused
from tests.helpers import ROOT, records_of, wait_until
from tests.jobs import run_job
from tests.launch import Cluster, Launch
from tests.search import DIGITS, search, trials_of


@pytest.fixture(scope="module")
def searched(cluster: dict[str, str]) -> tuple[dict[str, Any], str]:
    """The result of a search, and what it printed."""
    return search(cluster, "name=searched", "train.epochs=3", "tune.trials=4")


def test_a_search_gives_back_a_recipe_that_trains(
    cluster: dict[str, str], searched: tuple[dict[str, Any], str]
) -> None:
    result, shown = searched
    metrics, artifacts = result["metrics"], result["artifacts"]
    trials = trials_of(cluster, result["run_id"])
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    pruned = [trial for trial in trials if trial.state == TrialState.PRUNED]
    assert (metrics["trials"], metrics["trials_pruned"], metrics["trials_failed"]) == (4, len(pruned), 0)
    assert pruned
    assert metrics["best_value"] == max(max(trial.intermediate_values.values()) for trial in trials)
    assert metrics["epochs_trained"] == sum(len(trial.intermediate_values) for trial in trials)
    assert all(max(trial.intermediate_values) == 3 for trial in complete)
    assert all(trial.value == trial.intermediate_values[max(trial.intermediate_values)] for trial in pruned)
    assert trials[0].params["train.optimizer.lr"] == load_recipe(ROOT / DIGITS).train.optimizer.lr
    rows = [line.split() for line in shown.splitlines() if " complete " in line or " pruned " in line]
    assert sorted(int(row[0]) for row in rows) == list(range(4))
    table = pd.read_parquet(artifacts["trials"])
    assert table["state"].tolist() == [trial.state.name.lower() for trial in trials]
    page = Path(artifacts["report"]).read_text(encoding="utf-8")
    of_val_accuracy = ("History of val_accuracy", "Importance for val_accuracy", "Slices of val_accuracy")
    for title in (*of_val_accuracy, "Timeline", "Trials by epoch"):
        assert f">{title}" in page
    best = load_recipe(artifacts["best_recipe"])
    tree = json.loads(best.model_dump_json())
    for key, value in metrics["best_params"].items():
        node = tree
        for part in key.split("."):
            node = node[part]
        assert node == value
    storage = Path(cluster["RAYLOOM_STORAGE"])
    assert not list(storage.glob(f"runs/tune/{result['run_id']}/trials/*/checkpoints"))
    assert not list(storage.glob(f"runs/tune/{result['run_id']}/ray")), "Ray Tune's own files are not read again"
    trained = run_job(cluster, "train", artifacts["best_recipe"], "train.workers=1")
    assert trained["metrics"]["val_accuracy"] >= metrics["best_value"], "it was cut short, and whole is worth no less"


def test_optunas_dashboard_shows_the_study_as_it_is(
    cluster: dict[str, str], searched: tuple[dict[str, Any], str], launch: Launch
) -> None:
    result, _ = searched
    (port,) = unused(1)
    dashboard = launch("optuna-dashboard", result["artifacts"]["study"], "--host=127.0.0.1", f"--port={port}")
    wait_until(lambda: not is_free(port) or dashboard.process.poll() is not None)
    studies = f"http://127.0.0.1:{port}/api/studies"
    (study,) = httpx.get(studies).json()["study_summaries"]
    shown = httpx.get(f"{studies}/{study['study_id']}").json()
    dashboard.process.terminate()
    dashboard.ends()
    trials = trials_of(cluster, result["run_id"])
    assert (shown["name"], shown["directions"]) == (result["run_id"], ["maximize"])
    assert [item["number"] for item in shown["best_trials"]] == [result["metrics"]["best_trial"]]
    for row, trial in zip(shown["trials"], trials, strict=True):
        assert row["state"].upper() == trial.state.name
        assert row["values"] == trial.values
        assert {value["step"]: value["value"] for value in row["intermediate_values"]} == trial.intermediate_values
        params = {param["name"]: param["param_external_value"] for param in row["params"]}
        assert params == {name: str(value) for name, value in trial.params.items()}


def test_a_trial_that_no_cluster_has_room_for_is_refused_at_once(cluster: dict[str, str]) -> None:
    before = sorted(Path(cluster["RAYLOOM_STORAGE"]).glob("*/*/*"))
    result, _ = search(cluster, "tune.workers=64", "tune.scheduler=none", succeeds=False)
    assert "need 64 CPUs" in result["error"]
    assert sorted(Path(cluster["RAYLOOM_STORAGE"]).glob("*/*/*")) == before


SLOWER = [
    "train.early_stopping=null", "model.args.width=8", "tune.metric=val_loss", "tune.mode=min", "tune.concurrent=1",
    "tune.space=tests.faults.troubled:slower", "tune.sampler=random", "tune.seed=8263",
]  # fmt: skip
"""One trial after another: with the recipe's rate, with four that are lower and lower, and with a higher one."""


@pytest.mark.slow
def test_the_median_ends_trials_and_a_limit_the_search(cluster: dict[str, str]) -> None:
    limit = "tune.stop.epochs 12 are trained"
    result, _ = search(
        cluster,
        *("name=median", *SLOWER, "train.epochs=3", "tune.scheduler=median", "tune.trials=9", "tune.stop.epochs=12"),
    )
    trials = trials_of(cluster, result["run_id"])
    ended = [(trial.state, max(trial.intermediate_values), trial.user_attrs.get("cause")) for trial in trials]
    behind = (TrialState.PRUNED, 1, "stopped by median after epoch 1")
    assert ended == [(TrialState.COMPLETE, 3, None)] * 3 + [behind] * 2 + [(TrialState.PRUNED, 1, limit)]
    metrics = result["metrics"]
    assert (metrics["ended_because"], metrics["epochs_trained"], metrics["best_trial"]) == (limit, 12, 0)


@pytest.mark.slow
@pytest.mark.faults
def test_hyperband_ends_trials_in_each_of_its_brackets(cluster: dict[str, str]) -> None:
    result, _ = search(
        cluster,
        *("name=hyperband", *SLOWER, "train.epochs=5", "tune.scheduler=hyperband", "tune.reduction_factor=2"),
        "tune.trials=5",
    )
    trials = trials_of(cluster, result["run_id"])
    ended = [trial for trial in trials if trial.state == TrialState.PRUNED]
    assert ended, "of five that are worse and worse, two share one of three brackets"
    for trial in ended:
        epoch = max(trial.intermediate_values)
        assert epoch in (1, 2, 4)
        assert trial.user_attrs["cause"] == f"stopped by hyperband after epoch {epoch}"
    whole = [trial for trial in trials if trial not in ended]
    assert all((item.state, max(item.intermediate_values)) == (TrialState.COMPLETE, 5) for item in whole)
    assert result["metrics"]["best_trial"] == 0


@pytest.mark.slow
@pytest.mark.faults
def test_trials_of_two_workers_wait_for_the_scheduler_and_free_them(cluster: dict[str, str], ray: Cluster) -> None:
    result, _ = search(
        cluster,
        *("train.epochs=3", "train.early_stopping=null", "train.profile={wait: 0, warmup: 0, active: 1}"),
        *("model.factory=tests.faults.troubled:TroubledCnn", "model.args={width: 16, pause_s: 0.05}"),
        *("tune.space=tests.faults.troubled:rates", "tune.trials=3", "tune.workers=2", "tune.reduction_factor=2"),
    )
    trials = trials_of(cluster, result["run_id"])
    assert not any(trial.user_attrs.get("failures") for trial in trials)
    folder = Path(cluster["RAYLOOM_STORAGE"]) / "runs/tune" / result["run_id"]
    ends = []
    for trial in trials:
        records = records_of(folder / f"trials/{trial.number:04d}")
        epochs = [record["epoch"] for record in records if "val_loss" in record]
        assert epochs == list(trial.intermediate_values), "an epoch was trained that the scheduler had not asked for"
        ends.append((trial.state.name, len(epochs)))
    assert sorted(ends) == [("COMPLETE", 3), ("PRUNED", 1), ("PRUNED", 1)]
    assert result["metrics"]["epochs_trained"] == 5
    assert result["metrics"]["best_value"] == max(trial.value or 0.0 for trial in trials) > 0.5
    profiles = sorted(str(path.relative_to(folder / "trials")) for path in folder.glob("trials/*/profile/rank*"))
    assert profiles == [f"{trial:04d}/profile/rank{rank}.pt.trace.json" for trial in (0, 1, 2) for rank in (0, 1)]
    wait_until(ray.is_idle)


@pytest.mark.slow
@pytest.mark.faults
def test_a_search_of_two_objectives_learns_from_another_and_runs_as_many_trials_at_once_as_it_may(
    cluster: dict[str, str],
) -> None:
    objectives = ("tune.metric=[val_accuracy, parameters]", "tune.mode=[max, min]", "tune.scheduler=none")
    settings = ("train.epochs=1", "tune.trials=2", *objectives)
    result, shown = search(cluster, *settings)
    first, second = trials_of(cluster, result["run_id"])
    assert "2 trials at once" in shown
    assert first.datetime_complete > second.datetime_start
    front = result["metrics"]["pareto_front"]
    assert front[0]["values"] == result["metrics"]["best_values"]
    assert ">Pareto front</h2>" in Path(result["artifacts"]["report"]).read_text(encoding="utf-8")

    after, shown = search(cluster, *settings, f"tune.warm_start=[{result['run_id']}]", "tune.concurrent=1")
    trials = trials_of(cluster, after["run_id"])
    learned = [trial for trial in trials if "learned_from" in trial.user_attrs]
    own = [trial for trial in trials if trial not in learned and "duplicate_of" not in trial.user_attrs]
    assert [item.values for item in learned] == [first.values, second.values]
    assert "1 trials at once" in shown
    assert own[0].datetime_complete <= own[1].datetime_start
    assert own[0].params == first.params
    assert all(item["params"] in [again.user_attrs["values"] for again in own] for item in front)
    assert after["metrics"]["trials"] == 2


@pytest.mark.slow
@pytest.mark.faults
def test_of_a_population_the_one_behind_goes_on_from_the_best(cluster: dict[str, str]) -> None:
    result, _ = search(
        cluster,
        *("train.epochs=8", "train.early_stopping=null", "model.args.width=8"),
        *("tune.space=tests.faults.troubled:rates", "tune.scheduler=pbt", "tune.trials=2", "tune.metric=val_loss"),
        "tune.mode=min",
    )
    trials = trials_of(cluster, result["run_id"])
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 2
    assert all(max(trial.intermediate_values) == 8 for trial in trials)
    assert not any(trial.user_attrs.get("failures") for trial in trials)
    changed = [trial for trial in trials if trial.user_attrs["values"] != trial.params]
    assert changed, "nobody was given another's values"
    folder = Path(cluster["RAYLOOM_STORAGE"]) / "runs/tune" / result["run_id"]
    logs = [(folder / f"trials/{trial.number:04d}/log.txt").read_text(encoding="utf-8") for trial in trials]
    assert all("going on from step" in logs[item.number] for item in changed)
    assert result["metrics"]["epochs_trained"] == sum(len(re.findall(r"^epoch \d/8  loss", log, re.M)) for log in logs)
