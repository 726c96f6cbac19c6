"""Runs in an MLflow server, by its client."""

import logging
import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from app.checksums import sha256_of
from app.tracking.tracker import Point, PublishedVersion, RunEnd, RunFacts, Status

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # a call is repeated anyway, with what is new by then
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_MAX_VALUE_LENGTH = 500
"""Of a parameter; servers before 2.8 refuse longer ones. The whole recipe is among the run's files."""
_MAX_NAME_LENGTH = 250
_HASH = 12
_CUT = _MAX_NAME_LENGTH - _HASH - 1
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

    confirms_points = True

    def __init__(
        self, uri: str, experiment: str, register_versions: bool = False, has_secret_address: bool = False
    ) -> None:
        """``register_versions``: whether versions that a run publishes enter the model registry."""
        self._uri, self._experiment, self._register_versions = uri, experiment, register_versions
        self.has_secret_address = has_secret_address
        self._uploaded: set[tuple[str, str]] = set()
        """Ids of runs with the names of their files that an earlier try of ``close`` has added."""

    def open(self, facts: RunFacts, run_id: str | None) -> str:
        """Create a run and return its id, or go on with ``run_id``. A run that an earlier try created is found."""
        known = run_id if run_id and self._knows(run_id) else self._find(facts.lineage["folder"])
        if known is None:
            parent = {"mlflow.parentRunId": facts.parent} if facts.parent else {}
            tags = {**parent, "folder": facts.lineage["folder"]}
            return str(self._client.create_run(self._experiment_id, run_name=facts.name, tags=tags).info.run_id)
        self._client.update_run(known, status="RUNNING")
        return known

    def describe(self, run_id: str, facts: RunFacts) -> None:
        """Add parameters and tags. MLflow never changes a parameter, so a tag has the new value of a resumed run."""
        from mlflow.entities import Param, RunTag

        known = self._client.get_run(run_id).data.params
        parameters = {_name(key): value[:_MAX_VALUE_LENGTH] for key, value in facts.parameters.items()}
        changed = {f"resumed with {key}": value for key, value in parameters.items() if known.get(key, value) != value}
        tags = {"job": facts.job, "recipe": facts.recipe, **facts.lineage, **changed}
        self._client.log_batch(
            run_id,
            params=[Param(key, value) for key, value in parameters.items() if key not in known],
            tags=[RunTag(_name(key), value) for key, value in tags.items()],
        )

    def log(self, run_id: str, points: Sequence[Point]) -> None:
        """Add points."""
        self._client.log_batch(run_id, metrics=_metrics(points))

    def close(self, run_id: str, end: RunEnd) -> None:
        """End the run, register the version that it made, and add its files, which lie in another storage."""
        from mlflow.entities import RunTag

        tags = {"status": end.status, **end.lineage}
        self._client.log_batch(
            run_id,
            metrics=_metrics([Point(0, end.metrics, end.time_s)]),
            tags=[RunTag(_name(key), value) for key, value in tags.items()],
        )
        self._client.set_terminated(run_id, _STATUS[end.status], end_time=_milliseconds(end.time_s))
        if self._register_versions and end.version:
            self._register(run_id, end.version)
        # Their storage may fail alone. The next try of ``close`` adds only the missing files.
        for file in end.files:
            if (run_id, file.name) not in self._uploaded:
                self._client.log_artifact(run_id, str(file))
                self._uploaded.add((run_id, file.name))
        self._uploaded.clear()  # the files of a resumed run are new

    @cached_property
    def _client(self) -> "MlflowClient":
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        if self.has_secret_address:
            for library in ("mlflow", "urllib3"):  # their warnings show parts of the address
                logging.getLogger(library).setLevel(logging.CRITICAL)
        return MlflowClient(self._uri)

    @cached_property
    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        return str(found.experiment_id if found else self._client.create_experiment(self._experiment))

    def _knows(self, run_id: str) -> bool:
        """Return whether the server has a run."""
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

        try:
            self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                return False
            raise
        return True

    def _find(self, folder: str) -> str | None:
        """Return the id of the run that is a folder's copy; None if the experiment has none."""
        found = self._client.search_runs([self._experiment_id], f'tags.folder = "{folder}"', max_results=1)
        return str(found[0].info.run_id) if found else None

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


def _name(given: str) -> str:
    """Return a name that MLflow takes: of letters, digits and some signs, that is no path to another name.

    Another sign becomes its code between underscores, such as ``C_2b__2b_`` for ``C++``. A long name ends in its hash.
    """
    is_path = given.startswith(("/", ".")) or posixpath.normpath(given) != given
    name = re.sub(r"[^\w. :-]" if is_path else r"[^/\w. :-]", lambda sign: f"_{ord(sign[0]):x}_", given)
    name = re.sub(r"^\.+", lambda dots: "_2e_" * len(dots[0]), name)
    return name if len(name) <= _MAX_NAME_LENGTH else f"{name[:_CUT]}:{sha256_of(given.encode())[:_HASH]}"


def _metrics(points: Sequence[Point]) -> "list[Metric]":
    from mlflow.entities import Metric

    return [
        Metric(_name(name), value, _milliseconds(point.time_s), point.step)
        for point in points
        for name, value in point.values.items()
    ]


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1e3)
