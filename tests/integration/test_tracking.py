"""Jobs that copy themselves to MLflow's own server while they run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.ports import unused
from tests.helpers import in_fork, result_of, steps_of
from tests.jobs import run_job
from tests.mlflow_server import MlflowServer, mlflow_server

SHORT = ["recipes/digits.yaml", "train.workers=1", "train.epochs=2"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as running:
        yield running


def test_a_training_is_copied_and_one_whose_server_is_away_ends_as_well(tmp_path: Path, server: MlflowServer) -> None:
    (port,) = unused(1)
    for name, url in {"copied": server.url, "away": f"http://127.0.0.1:{port}"}.items():
        storage = tmp_path / name
        tracked = [f"storage={storage}", f"tracking.mlflow={url}", f"tracking.experiment={name}"]
        done = in_fork("app.training", *SHORT, *tracked)
        assert done.returncode == 0, done.stderr
        result = result_of(done.stdout)
        assert result["status"] == "succeeded"
        (folder,) = storage.glob("runs/train/*")
        steps = [record["step"] for record in steps_of(folder)]
        if name == "copied":
            (run,) = server.runs(name)
            assert (run["name"], run["status"]) == (result["run_id"], "FINISHED")
            assert server.steps(run["id"], "step/loss") == steps
            assert run["metrics"]["result/val_accuracy"] == result["metrics"]["val_accuracy"]
            assert "report.html" in {file.path for file in server.client.list_artifacts(run["id"])}
        else:
            assert f"mlflow lacks up to {len(steps) + 2} records" in done.stderr
            assert server.runs(name) == []


@pytest.mark.slow
def test_the_trials_of_a_search_are_its_child_runs(cluster: dict[str, str], server: MlflowServer) -> None:
    tracked = ["name=followed", f"tracking.mlflow={server.url}"]
    result = run_job(cluster, "tune", *SHORT, *tracked, "tune.trials=3", "tune.epochs=2")
    runs = {run["name"]: run for run in server.runs("followed")}
    assert len(runs) == 4
    search = runs.pop(result["run_id"])
    assert search["metrics"]["result/best_value"] == result["metrics"]["best_value"]
    assert {run["tags"]["mlflow.parentRunId"] for run in runs.values()} == {search["id"]}
    assert {run["status"] for run in runs.values()} == {"FINISHED"}
    states = [run["tags"]["status"] for run in runs.values()]
    assert states.count("pruned") == result["metrics"]["trials_pruned"]
    assert all(run["params"]["train.optimizer.lr"] and run["metrics"]["epoch/val_loss"] for run in runs.values())
