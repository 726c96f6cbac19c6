"""Searches on a cluster: trials that fail, drivers that are killed, and the recipe that comes out."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
import psutil
from optuna.trial import FrozenTrial, TrialState

from app.config import load_recipe
from tests.helpers import BIN, ROOT, result_of, run, wait_until

DIGITS = "recipes/digits.yaml"
MODEL = "model.factory=tests.integration.troubled:TroubledCnn"


def tune(cluster: dict[str, str], *overrides: str, succeeds: bool = True) -> tuple[dict[str, Any], str]:
    done = run("rayloom", "submit", "tune", DIGITS, *overrides, environment=cluster, timeout=500)
    shown = done.stdout.partition("Status message:")[0]
    assert (done.returncode == 0) is succeeds, done.stdout + done.stderr
    return result_of(shown), shown


def trials_of(cluster: dict[str, str], run_id: str) -> list[FrozenTrial]:
    file = Path(cluster["RAYLOOM_STORAGE"]) / "studies" / f"{run_id}.db"
    return optuna.load_study(study_name=run_id, storage=f"sqlite:///{file}").get_trials(deepcopy=False)


def test_a_search_gives_back_a_recipe_that_trains(cluster: dict[str, str]) -> None:
    result, shown = tune(cluster, "name=searched", "train.epochs=4", "tune.trials=6")
    metrics, artifacts = result["metrics"], result["artifacts"]
    trials = trials_of(cluster, result["run_id"])
    complete = [each for each in trials if each.state == TrialState.COMPLETE]
    pruned = [each for each in trials if each.state == TrialState.PRUNED]
    assert (metrics["trials"], metrics["trials_pruned"], metrics["trials_failed"]) == (6, len(pruned), 0)
    assert pruned
    assert metrics["best_value"] == max(each.value or 0.0 for each in complete)
    assert metrics["epochs_trained"] == sum(len(each.intermediate_values) for each in trials)
    assert all(max(each.intermediate_values) == 4 for each in complete)
    assert all(each.value == each.intermediate_values[max(each.intermediate_values)] for each in pruned)
    assert trials[0].params["train.optimizer.lr"] == load_recipe(ROOT / DIGITS).train.optimizer.lr
    rows = [line.split() for line in shown.splitlines() if " complete " in line or " pruned " in line]
    assert sorted(int(row[0]) for row in rows) == list(range(6))
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


def test_trials_fail_alone_are_retried_and_say_why(cluster: dict[str, str], tmp_path: Path) -> None:
    result, _ = tune(
        cluster,
        *("name=troubled", MODEL, f"model.args={{trouble: none, batch: 30, once: {tmp_path / 'once'}}}"),
        *("train.epochs=3", "train.hang_timeout_s=30", "train.early_stopping=null"),
        *("tune.space=tests.integration.troubled:troubles", "tune.sampler=grid", "tune.scheduler=none"),
    )
    by_trouble = {each.params["model.args.trouble"]: each for each in trials_of(cluster, result["run_id"])[:5]}
    assert len(by_trouble) == 5
    for trouble in ("none", "killed once"):
        assert by_trouble[trouble].state == TrialState.COMPLETE
        assert len(by_trouble[trouble].intermediate_values) == 3
    assert len(by_trouble["killed once"].user_attrs["failures"]) == 1
    for trouble, cause in (
        ("killed", "process ended"),
        ("hangs", "no progress for 30 s"),
        ("not a number", "not finite"),
    ):
        trial = by_trouble[trouble]
        assert trial.state == TrialState.FAIL
        assert cause in trial.user_attrs["cause"]
        assert len(trial.user_attrs["failures"]) == 1
        assert list(trial.intermediate_values) == [1, 2]  # tried again from the checkpoint of the first
    assert result["metrics"]["trials_failed"] == 3


def test_a_killed_search_goes_on_without_repeating_a_trial(cluster: dict[str, str]) -> None:
    overrides = ["name=killed", MODEL, "model.args={width: 16, pause_s: 0.02}", "train.epochs=3", "tune.trials=6"]
    overrides += ["tune.space=tests.integration.troubled:rates", "tune.scheduler=none", "train.early_stopping=null"]
    storage = Path(cluster["RAYLOOM_STORAGE"])
    command = [str(BIN / "rayloom"), "submit", "tune", DIGITS, *overrides]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, **cluster}, stdout=subprocess.DEVNULL) as job:

        def ended() -> list[FrozenTrial]:
            runs = list(storage.glob("runs/tune/*-killed-*/config.yaml"))
            return (
                [each for each in trials_of(cluster, runs[0].parent.name) if each.state.is_finished()] if runs else []
            )

        wait_until(lambda: len(ended()) >= 2, timeout_s=300)
        os.kill(driver_of("name=killed"), signal.SIGKILL)
        job.wait(120)
    (folder,) = storage.glob("runs/tune/*-killed-*")
    before = trials_of(cluster, folder.name)
    assert any(each.state == TrialState.RUNNING for each in before)
    result, shown = tune(cluster, *overrides, "tune.resume=true")
    after = trials_of(cluster, folder.name)
    assert result["run_id"] == folder.name, shown
    assert len(after) == 6
    assert all(each.state == TrialState.COMPLETE and len(each.intermediate_values) == 3 for each in after)
    for each in before:
        if each.state.is_finished():
            assert after[each.number].datetime_complete == each.datetime_complete
        assert after[each.number].params == each.params
    assert len({str(each.params) for each in after}) == 6


def driver_of(word: str) -> int:
    """The id of the job's own process, which has ``word`` on its command line."""
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if word in line and line[1:3] == ["-m", "jobs.tune"]:
            return process.pid
    raise AssertionError(f"no driver with {word}")


def test_what_cannot_be_searched_is_refused_at_once(cluster: dict[str, str]) -> None:
    before = sorted(Path(cluster["RAYLOOM_STORAGE"]).glob("*/*/*"))
    for overrides, words in (
        (["tune=null"], "has no tune section"),
        (["tune.space=tune_spaces.image:spaces"], "did you mean 'space'?"),
        (["tune.space=tune_spaces.text:space"], "no such key"),
        (["tune.storage=postgresql+psycopg://127.0.0.1:9/x"], "cannot be used"),
        (["tune.workers=64"], "need 64 CPUs"),
        (["tune.warm_start=[nothing]"], "nothing.db' is missing"),
    ):
        result, _ = tune(cluster, *overrides, succeeds=False)
        assert words in result["error"]
    assert sorted(Path(cluster["RAYLOOM_STORAGE"]).glob("*/*/*")) == before
