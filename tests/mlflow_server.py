"""MLflow's own server, as far as its small package has it: with runs in files."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from mlflow.tracking import MlflowClient

from app.ports import unused
from tests.helpers import wait_until


class MlflowServer:
    """A running server."""

    def __init__(self, url: str) -> None:
        self.url, self.client = url, MlflowClient(url)

    def runs(self, experiment: str = "digits") -> list[dict[str, object]]:
        """The runs of an experiment: name, status, tags, parameters and last values of metrics, and the id."""
        found = self.client.get_experiment_by_name(experiment)
        runs = self.client.search_runs([found.experiment_id]) if found else []
        return [
            {"id": run.info.run_id, "name": run.info.run_name, "status": run.info.status, **run.data.to_dictionary()}
            for run in runs
        ]

    def steps(self, run_id: str, metric: str) -> list[int]:
        """The steps of a metric, in the order in which they came."""
        return [point.step for point in self.client.get_metric_history(run_id, metric)]


@contextmanager
def mlflow_server(folder: Path) -> Iterator[MlflowServer]:
    """Run a server with its files in ``folder``."""
    (port,) = unused(1)
    settings = {
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "_MLFLOW_SERVER_FILE_STORE": str(folder / "runs"),
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(folder / "artifacts"),
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
    }
    command = [sys.executable, "-m", "flask", "--app", "mlflow.server:app", "run", f"--port={port}"]
    with (folder / "server.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=folder, env=os.environ | settings, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: _answers(url))
        yield MlflowServer(url)
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.HTTPError:
        return False
