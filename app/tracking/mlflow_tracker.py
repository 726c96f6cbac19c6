"""Runs in an MLflow server, by its client."""

import os
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from app.tracking.tracker import Point, PublishedVersion, RunEnd, RunFacts, Status

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # a call is repeated anyway, with what is new by then
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_PER_CALL = 100
"""Parameters that MLflow takes in one call."""
_MAX_VALUE_LENGTH = 500
"""Of a parameter; servers before 2.8 refuse longer ones. The whole recipe is among the run's files."""
_MODEL_FOLDER = "model"
_STATUS: Mapping[Status, str] = {
    "succeeded": "FINISHED",
    "pruned": "FINISHED",
    "stopped": "KILLED",
    "interrupted": "KILLED",
    "failed": "FAILED",
}


class MlflowTracker:
    """Copies runs into an experiment."""

    name = "mlflow"

    def __init__(self, uri: str, experiment: str, register_versions: bool = False) -> None:
        """``register_versions``: whether versions that a run publishes enter the model registry."""
        self._uri, self._experiment, self._register_versions = uri, experiment, register_versions

    def open(self, facts: RunFacts, run_id: str | None) -> str:
        """Create a run and return its id, or go on with ``run_id`` if the server knows it."""
        known = self._find(run_id) if run_id else None
        if known is None:
            tags = {"mlflow.parentRunId": facts.parent} if facts.parent else {}
            run = self._client.create_run(self._experiment_id, run_name=facts.name, tags=tags)
            run_id, known = run.info.run_id, {}
        else:
            self._client.update_run(run_id, status="RUNNING")
        assert run_id is not None
        # MLflow never changes a parameter. A resumed run may have another value.
        parameters = {key: value[:_MAX_VALUE_LENGTH] for key, value in facts.parameters.items()}
        new = {key: value for key, value in parameters.items() if key not in known}
        changed = {f"resumed with {key}": value for key, value in parameters.items() if known.get(key, value) != value}
        self._add(run_id, new, {"job": facts.job, "recipe": facts.recipe, **facts.lineage, **changed})
        return run_id

    def log(self, run_id: str, points: Sequence[Point]) -> None:
        """Add points, with the present as their time."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1e3)
        numbers = [Metric(name, value, now_ms, point.step) for point in points for name, value in point.values.items()]
        self._client.log_batch(run_id, metrics=numbers)

    def close(self, run_id: str, end: RunEnd) -> None:
        """End the run, add its files, and register the version that it made."""
        for file in end.files:
            self._client.log_artifact(run_id, str(file))
        self._add(run_id, {}, {"status": end.status, **end.lineage})
        if end.metrics:
            self.log(run_id, [Point(0, end.metrics)])
        if self._register_versions and end.version:
            self._register(run_id, end.version)
        self._client.set_terminated(run_id, _STATUS[end.status])

    @cached_property
    def _client(self) -> "MlflowClient":
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        return MlflowClient(self._uri)

    @cached_property
    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        return str(found.experiment_id if found else self._client.create_experiment(self._experiment))

    def _find(self, run_id: str) -> dict[str, str] | None:
        """Return the parameters of a run; None if the server has no such run."""
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

        try:
            return dict(self._client.get_run(run_id).data.params)
        except MlflowException as error:
            if error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                return None
            raise

    def _add(self, run_id: str, parameters: Mapping[str, str], tags: Mapping[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        all_parameters = [Param(key, value) for key, value in parameters.items()]
        for first in range(0, len(all_parameters), _PER_CALL):
            self._client.log_batch(run_id, params=all_parameters[first : first + _PER_CALL])
        self._client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def _register(self, run_id: str, version: PublishedVersion) -> None:
        """Add a version to the registry, unless an earlier try has done so.

        MLflow refuses folders of a local disk. The version's source is then the run, and a tag has the folder.
        """
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(version.name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        if any(known.run_id == run_id for known in self._client.search_model_versions(f"name='{version.name}'")):
            return
        source = version.location if "://" in version.location else f"runs:/{run_id}/{_MODEL_FOLDER}"
        tags = {"rayloom.version": str(version.number), "rayloom.location": version.location}
        self._client.create_model_version(version.name, source, run_id, tags=tags, await_creation_for=0)
