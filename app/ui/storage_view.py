"""What ``rayloom ui`` shows of storage. Answers are cheap: what cannot change any more is read once."""

import math
from collections.abc import Mapping
from datetime import datetime
from threading import Lock
from typing import Any

from pydantic import BaseModel
from upath import UPath

from app.pages.page import REPORT_FILE
from app.pages.words import MISSING
from app.reports.catalog import (
    RunSummary,
    compared_figures,
    find_run,
    flat_metrics,
    list_runs,
    recipe_differences,
    summarize,
)
from app.reports.curves import Curve, CurveFile, Curves
from app.reports.report import has_page
from app.reports.run_folder import RunFolder
from app.repository.repository import Repository
from app.telemetry.events import Event, read_events

_MAX_CURVE_FILES = 50
"""Runs whose curves are kept in memory."""


class ListedRun(BaseModel):
    """A run in the list."""

    job: str
    run_id: str
    recipe: str
    status: str
    began: datetime | None
    duration_s: float | None
    headline: str

    @classmethod
    def of(cls, summary: RunSummary) -> "ListedRun":
        """The run of a summary."""
        return cls.model_validate(summary, from_attributes=True)


class RunDetails(BaseModel):
    """One run."""

    summary: ListedRun
    error: str | None
    metrics: dict[str, float | str]
    artifacts: dict[str, str]
    events: list[Event]
    recipe_text: str
    has_page: bool


class PlottedCurve(BaseModel):
    """A metric by step. None stands for what is no finite number."""

    steps: list[int]
    values: list[float | None]

    @classmethod
    def of(cls, curve: Curve) -> "PlottedCurve":
        """A curve with as many points as a screen shows."""
        thinned = curve.thinned()
        return cls(steps=thinned.steps, values=[value if math.isfinite(value) else None for value in thinned.values])


class RunCurves(BaseModel):
    """All curves of a run by metric."""

    of_steps: dict[str, PlottedCurve]
    of_epochs: dict[str, PlottedCurve]


class ComparedValue(BaseModel):
    """A key of the recipe or a figure, with the value of each run."""

    key: str
    values: list[Any]


class ComparedRuns(BaseModel):
    """Several runs side by side."""

    runs: list[ListedRun]
    differences: list[ComparedValue]
    metrics: list[ComparedValue]


class ListedVersion(BaseModel):
    """A published version."""

    name: str
    version: int
    aliases: tuple[str, ...]
    precision: str = ""
    engine: str = "damaged"
    score: str = ""
    """The metric and its value; empty if none was measured."""
    size_mb: float | None = None
    created: datetime | None = None
    train_run: str = ""
    compile_run: str = ""


class StorageView:
    """Reads runs and models for the page. Its methods may be called from several threads."""

    def __init__(self, storage: UPath) -> None:
        self.storage = storage
        self._ended: dict[str, RunSummary] = {}
        """Summaries of runs that have succeeded, which nothing changes any more."""
        self._curves: dict[str, CurveFile] = {}
        self._lock = Lock()

    def runs(self, job: str | None, recipe: str | None, limit: int) -> list[ListedRun]:
        """List runs, the newest first."""
        summaries = list_runs(self.storage, job, recipe, limit, self._ended)
        self._ended = {**self._ended, **{run.key: run for run in summaries if run.status == "succeeded"}}
        return [ListedRun.of(summary) for summary in summaries]

    def find(self, named: str) -> RunFolder:
        """Return a run. Raises StorageError if there is none."""
        return find_run(self.storage, named)

    def run(self, named: str) -> RunDetails:
        """Return all of a run but its curves. Raises StorageError if there is none."""
        run = self.find(named)
        result = run.result
        return RunDetails(
            summary=ListedRun.of(summarize(run)),
            error=result.error if result else None,
            metrics=_finite(flat_metrics(result.metrics)) if result else {},
            artifacts=result.artifacts if result else {},
            events=read_events(run.path),
            recipe_text=run.recipe_text,
            has_page=has_page(run.job) or (run.path / REPORT_FILE).exists(),
        )

    def curves(self, named: str) -> RunCurves:
        """Return the curves of a run. Only lines that are new since the last call are read."""
        run = self.find(named)
        with self._lock:
            curves = self._read_curves(run)
            return RunCurves(
                of_steps={name: PlottedCurve.of(curve) for name, curve in curves.of_steps.items()},
                of_epochs={name: PlottedCurve.of(curve) for name, curve in curves.of_epochs.items()},
            )

    def _read_curves(self, run: RunFolder) -> Curves:
        """Return the curves of a run. The caller holds the lock."""
        file = self._curves.setdefault(str(run.path), CurveFile(run.path))
        while len(self._curves) > _MAX_CURVE_FILES:
            self._curves.pop(next(iter(self._curves)))
        return file.read()

    def compare(self, named: list[str]) -> ComparedRuns:
        """Return what differs between runs. Raises StorageError if one of them is not there."""
        runs = [self.find(name) for name in named]
        with self._lock:
            metrics = [_finite(compared_figures(run, self._read_curves(run))) for run in runs]
        names = dict.fromkeys(name for figures in metrics for name in figures)
        return ComparedRuns(
            runs=[ListedRun.of(summarize(run)) for run in runs],
            differences=[
                ComparedValue(key=difference.key, values=list(difference.values))
                for difference in recipe_differences([run.recipe for run in runs])
            ],
            metrics=[
                ComparedValue(key=name, values=[figures.get(name, MISSING) for figures in metrics]) for name in names
            ],
        )

    def models(self) -> list[ListedVersion]:
        """List every version of every model."""
        found = []
        for listed in Repository(self.storage).list_versions():
            head = {"name": listed.name, "version": listed.version, "aliases": listed.aliases}
            manifest = listed.manifest
            if manifest is None:
                found.append(ListedVersion(**head))
                continue
            found.append(
                ListedVersion(
                    **head,
                    precision=manifest.engine_key.precision,
                    engine=manifest.engine_key.engine,
                    score=str(manifest.score or ""),
                    size_mb=manifest.size_bytes / 1e6,
                    created=manifest.created,
                    train_run=(manifest.lineage.train_run or "").rpartition("/")[2],
                    compile_run=manifest.lineage.compile_run.rpartition("/")[2],
                )
            )
        return found


def _finite(figures: Mapping[str, float | str]) -> dict[str, float | str]:
    """Return figures as JSON can hold them: NaN and infinity as text."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }
