"""A search on a cluster, and the recipe that comes out. What it survives is in tests/faults."""

import json
from pathlib import Path

import pandas as pd
from optuna.trial import TrialState

from app.config import load_recipe
from tests.helpers import ROOT, result_of, run
from tests.search import DIGITS, search, trials_of


def test_a_search_gives_back_a_recipe_that_trains(cluster: dict[str, str]) -> None:
    result, shown = search(cluster, "name=searched", "train.epochs=3", "tune.trials=4")
    metrics, artifacts = result["metrics"], result["artifacts"]
    trials = trials_of(cluster, result["run_id"])
    complete = [each for each in trials if each.state == TrialState.COMPLETE]
    pruned = [each for each in trials if each.state == TrialState.PRUNED]
    assert (metrics["trials"], metrics["trials_pruned"], metrics["trials_failed"]) == (4, len(pruned), 0)
    assert pruned
    assert metrics["best_value"] == max(each.value or 0.0 for each in complete)
    assert metrics["epochs_trained"] == sum(len(each.intermediate_values) for each in trials)
    assert all(max(each.intermediate_values) == 3 for each in complete)
    assert all(each.value == each.intermediate_values[max(each.intermediate_values)] for each in pruned)
    assert trials[0].params["train.optimizer.lr"] == load_recipe(ROOT / DIGITS).train.optimizer.lr
    rows = [line.split() for line in shown.splitlines() if " complete " in line or " pruned " in line]
    assert sorted(int(row[0]) for row in rows) == list(range(4))
    table = pd.read_parquet(artifacts["trials"])
    assert table["state"].tolist() == [each.state.name.lower() for each in trials]
    page = Path(artifacts["report"]).read_text(encoding="utf-8")
    for title in ("History", "Parallel coordinates", "Slices", "Timeline", "Trials by epoch"):
        assert f"<h2>{title}" in page
    best = load_recipe(artifacts["best_recipe"])
    tree = json.loads(best.model_dump_json())
    for key, value in metrics["best_params"].items():
        node = tree
        for part in key.split("."):
            node = node[part]
        assert node == value
    storage = Path(cluster["RAYLOOM_STORAGE"])
    assert not list(storage.glob(f"runs/tune/{result['run_id']}/trials/*/checkpoints"))
    sent = run("rayloom", "submit", "train", artifacts["best_recipe"], "train.workers=1", environment=cluster)
    trained = result_of(sent.stdout)
    assert trained["metrics"]["val_accuracy"] == metrics["best_value"]


def test_a_trial_that_no_cluster_has_room_for_is_refused_at_once(cluster: dict[str, str]) -> None:
    before = sorted(Path(cluster["RAYLOOM_STORAGE"]).glob("*/*/*"))
    result, _ = search(cluster, "tune.workers=64", "tune.scheduler=none", succeeds=False)
    assert "need 64 CPUs" in result["error"]
    assert sorted(Path(cluster["RAYLOOM_STORAGE"]).glob("*/*/*")) == before
