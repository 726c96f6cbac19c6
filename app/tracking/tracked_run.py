"""A run with its trials in one tracker: what is told of each, and when."""

import json
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from upath import UPath

from app.artifacts import TRIALS
from app.config import parse_yaml
from app.shared_files import read
from app.storage import list_names, to_path
from app.telemetry.record import flatten, numbers
from app.tracking.copies import RunCopy, read_progress
from app.tracking.process import PARENT_FILE
from app.tracking.tracker import PublishedVersion, RunEnd, RunFacts, Status, Tracker

TRIAL_FILE = "trial.json"


class TrialNote(BaseModel):
    """``trial.json`` in a trial's folder: what only the search knows of it."""

    values: dict[str, Any]
    """The values that were drawn for it."""
    state: Literal["running", "complete", "pruned", "failed"] = "running"
    """A trial that waits for its promotion is running, too."""
    objectives: dict[str, float] = {}
    """The values of the search's metrics, once the trial is complete."""

    def to_end(self, time_s: float) -> RunEnd:
        """Return how the trial ended, at ``time_s``."""
        status: Status = "succeeded" if self.state == "complete" else "failed" if self.state == "failed" else "pruned"
        metrics = {f"result/{name}": value for name, value in self.objectives.items()}
        return RunEnd(status, metrics, time_s=time_s)


class TrackedRun:
    """Copies a run's folder and its trials' folders to one tracker."""

    def __init__(self, folder: UPath, tracker: Tracker) -> None:
        self._folder, self._tracker = folder, tracker
        parent = read(folder / PARENT_FILE)
        self.parent = to_path(parent.decode()) if parent else None
        """The folder of the lifecycle that the run is a part of."""
        self.is_finished = False
        self._copy = RunCopy(folder, tracker, self._facts)
        self._trials: dict[str, RunCopy] = {}
        self._ended_trials: set[str] = set()

    @property
    def must_wait(self) -> bool:
        """Whether the tracker does not know yet the lifecycle that this run is a part of."""
        return self.parent is not None and read_progress(self.parent, self._tracker) is None

    def advance(self) -> None:
        """Copy what is new, unless the run must wait. Raise what the tracker raises: a later call tries again."""
        if self.must_wait:
            return
        # The run comes first, because its trials name it as their parent.
        self._copy.advance()
        for name in sorted(set(list_names(self._folder / TRIALS)) - self._ended_trials):
            note = self._note_of(name)
            if note is not None:
                self._advance_trial(name, note)

    def finish(self) -> None:
        """Copy the rest, and end the run and its trials, unless the run must wait."""
        if self.must_wait:
            return
        self.advance()
        result = self._result()
        # Trials that were paused when the search ended.
        rest = RunEnd("pruned" if result.get("status") == "succeeded" else "interrupted")
        for name in sorted(self._trials.keys() - self._ended_trials):
            self._trials[name].finish(lambda _: rest)
            self._ended_trials.add(name)
        self._copy.finish(partial(self._end, result))
        self.is_finished = True

    def count_waiting(self) -> int:
        """Return the number of records that the tracker has not got."""
        return sum(copy.count_waiting() for copy in (self._copy, *self._trials.values()))

    def count_left_out(self) -> int:
        """Return the number of steps that were left out because too many came at once."""
        copies = (self._copy, *self._trials.values())
        return sum(copy.progress.left_out for copy in copies if copy.progress)

    def _advance_trial(self, name: str, note: TrialNote) -> None:
        folder = self._folder / TRIALS / name
        copy = self._trials.setdefault(name, RunCopy(folder, self._tracker, partial(self._trial_facts, name, note)))
        has_ended = note.state != "running"
        if not (has_ended and copy.progress and copy.progress.has_ended):  # else an earlier job has copied it
            copy.advance()
            if has_ended:
                copy.finish(lambda _: note.to_end(_time_of(folder / TRIAL_FILE)))
        if has_ended:
            self._ended_trials.add(name)

    def _facts(self) -> RunFacts:
        recipe = self._recipe()
        lineage = {"folder": str(self._folder)}
        if tuned := recipe.get("tuned_from"):
            lineage["tuned_from"] = f"trial {tuned['trial']} of {tuned['run']}"
        parent = read_progress(self.parent, self._tracker) if self.parent else None
        return RunFacts(
            name=self._folder.name,
            job=self._folder.parent.name,
            recipe=str(recipe.get("name", "")),
            parameters=_texts(recipe),
            lineage=lineage,
            parent=parent.run_id if parent else None,
        )

    def _trial_facts(self, name: str, note: TrialNote) -> RunFacts:
        assert self._copy.progress is not None
        return RunFacts(
            name=f"{self._folder.name}/{name}",
            job="trial",
            recipe=str(self._recipe().get("name", "")),
            parameters=_texts(note.values),
            lineage={"folder": str(self._folder / TRIALS / name)},
            parent=self._copy.progress.run_id,
        )

    def _end(self, result: dict[str, Any], files: list[Path]) -> RunEnd:
        metrics = {
            f"result/{name.replace('.', '/')}": value for name, value in numbers(result.get("metrics", {})).items()
        }
        artifacts: dict[str, str] = result.get("artifacts", {})
        return RunEnd(
            result.get("status", "interrupted"),
            metrics,
            artifacts,
            files,
            self._version(artifacts),
            _time_of(self._folder / "result.json"),
        )

    def _version(self, artifacts: dict[str, str]) -> PublishedVersion | None:
        """Return the version that a compile run has published."""
        if self._folder.parent.name != "compile" or "model" not in artifacts:
            return None
        name, _, number = artifacts["model"].rpartition("/")
        # The folder is runs/compile/ID in the storage.
        storage = self._folder.parent.parent.parent
        return PublishedVersion(name, int(number), str(storage / "models" / name / number))

    def _recipe(self) -> dict[str, Any]:
        loaded = parse_yaml((read(self._folder / "config.yaml") or b"").decode(errors="replace"))
        return loaded if isinstance(loaded, dict) else {}

    def _result(self) -> dict[str, Any]:
        """Return ``result.json``; nothing if the job was killed."""
        loaded = json.loads(read(self._folder / "result.json") or b"{}")
        return loaded if isinstance(loaded, dict) else {}

    def _note_of(self, name: str) -> TrialNote | None:
        try:
            return TrialNote.model_validate_json(read(self._folder / TRIALS / name / TRIAL_FILE) or b"")
        except ValidationError:
            return None


def _time_of(file: UPath) -> float:
    """Return when a file was written, in seconds since 1970; the present if there is none."""
    try:
        return float(file.fs.modified(file.path).timestamp())
    except FileNotFoundError:
        return time.time()


def _texts(fields: dict[str, Any]) -> dict[str, str]:
    """Return nested fields as texts by dotted keys, without those that are null."""
    return {key: str(value) for key, value in flatten(fields) if value is not None}
