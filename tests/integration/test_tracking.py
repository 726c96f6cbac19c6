"""Jobs that copy themselves to MLflow's own server while they run."""

from collections.abc import Iterator
from typing import Any

import pytest

from app.ports import unused
from tests.helpers import folder_of, in_fork, result_of, steps_of
from tests.jobs import run_job
from tests.mlflow_server import MlflowServer, mlflow_server

SHORT = ["recipes/digits.yaml", "train.workers=1", "train.epochs=2"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as running:
        yield running


def train(url: str, name: str) -> tuple[dict[str, Any], list[int], str]:
    """Train and copy to a server. Return the result, the steps, and the errors that were printed."""
    done = in_fork("app.training", *SHORT, f"tracking.mlflow={url}", f"tracking.experiment={name}")
    assert done.returncode == 0, done.stderr
    result = result_of(done.stdout)
    assert result["status"] == "succeeded"
    return result, [record["step"] for record in steps_of(folder_of(result))], done.stderr


def test_a_training_is_copied(server: MlflowServer) -> None:
    result, steps, _ = train(server.url, "copied")
    (run,) = server.runs("copied")
    assert (run["name"], run["status"]) == (result["run_id"], "FINISHED")
    assert server.steps(run["id"], "step/loss") == steps
    assert run["metrics"]["result/val_accuracy"] == result["metrics"]["val_accuracy"]
    assert "report.html" in {file.path for file in server.client.list_artifacts(run["id"])}


@pytest.mark.slow
def test_a_training_whose_server_is_away_ends_as_well(server: MlflowServer) -> None:
    (port,) = unused(1)
    _, steps, errors = train(f"http://127.0.0.1:{port}", "away")
    assert f"mlflow lacks up to {len(steps) + 2} records" in errors
    assert server.runs("away") == []


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
