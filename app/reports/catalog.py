"""All runs in storage: listed, found, compared and deleted. Files and S3 alike, with few requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from upath import UPath

from app.errors import RequestError, StorageError
from app.import_string import suggestion
from app.pages.words import MISSING
from app.reports.curves import read_curves
from app.reports.lifecycle import parts_of
from app.reports.run_folder import RunFolder, Status, headline
from app.repository.manifest import Manifest
from app.repository.repository import Repository
from app.runs import CONFIG_FILE, recipe_named_in, runs_folder
from app.shared_files import map_concurrently
from app.storage import list_names
from app.telemetry.record import flatten

JOBS = ("lifecycle", "prepare", "train", "tune", "compile", "deploy", "undeploy")
"""The jobs whose runs lie in storage, in the order in which their names are searched."""

_ID_TIME = "%Y%m%d-%H%M%S"
_ID_TIME_LENGTH = 15


@dataclass(frozen=True)
class RunSummary:
    """A run in the list of all runs."""

    job: str
    run_id: str
    recipe: str
    status: Status
    began: datetime | None
    """UTC; None for an id that does not begin with a time."""
    duration_s: float | None
    """None: it has not ended."""
    headline: str
    """The figures that a person wants first, or the error."""
    parts: tuple[str, ...] = ()
    """The keys of a lifecycle's parts, in their order."""

    @property
    def key(self) -> str:
        """The run among those of all jobs."""
        return f"{self.job}/{self.run_id}"


def list_runs(
    storage: UPath,
    job: str | None = None,
    recipe: str | None = None,
    limit: int | None = None,
    known: Mapping[str, RunSummary] = MappingProxyType({}),
) -> list[RunSummary]:
    """List runs, the newest first. Takes one request for each job, and one or two for each run that is listed.

    Args:
        job: only runs of this job.
        recipe: only runs of the recipe with this name.
        limit: maximum number of runs.
        known: summaries that are up to date, by ``key``; these runs are not read again.

    Raises:
        StorageError: there is no such job.
    """
    paths = [
        runs_folder(storage, name) / run_id
        for name in _jobs_in(storage, job)
        for run_id in list_names(runs_folder(storage, name))
        if recipe is None or recipe_named_in(run_id) == recipe
    ]
    # Ids begin with the time of the start.
    newest = sorted(paths, key=lambda path: path.name, reverse=True)[:limit]

    def summary(path: UPath) -> RunSummary | None:
        if found := known.get(f"{path.parent.name}/{path.name}"):
            return found
        run = RunFolder(path)
        is_run = run.result is not None or (path / CONFIG_FILE).exists()  # else a start that failed
        return summarize(run) if is_run else None

    return list(filter(None, map_concurrently(storage, summary, newest)))


def group_parts(runs: Sequence[RunSummary]) -> list[tuple[RunSummary, bool]]:
    """Put the parts of each lifecycle below it. Return the runs, each with whether it is such a part."""
    listed = {run.key: run for run in runs}
    parts = {run.key: [listed[key] for key in run.parts if key in listed] for run in runs}
    below = {part.key for found in parts.values() for part in found}
    groups = [[(run, False), *((part, True) for part in parts[run.key])] for run in runs if run.key not in below]
    return [row for group in groups for row in group]


def _jobs_in(storage: UPath, job: str | None) -> list[str]:
    """Return the given job, else all jobs that have runs. Raise StorageError if there is no such job.

    On an object store, a job without runs would take two requests.
    """
    if job:
        if job not in JOBS:
            near = suggestion(job, JOBS)
            raise StorageError(f"{job!r} is not a job that keeps runs: expected one of {', '.join(JOBS)}{near}").of(
                "job.unknown_kind"
            )
        return [job]
    return sorted(set(list_names(storage / "runs")) & set(JOBS), key=JOBS.index)


def summarize(run: RunFolder) -> RunSummary:
    """Return a run as the list shows it."""
    result = run.result
    return RunSummary(
        job=run.job,
        run_id=run.run_id,
        recipe=result.recipe if result else recipe_named_in(run.run_id),
        status=run.status,
        began=_time_in(run.run_id),
        duration_s=result.duration_s if result else None,
        headline=headline(result) if result else "",
        parts=tuple(f"{job}/{run_id}" for job, run_id in parts_of(run.path).items()) if run.job == "lifecycle" else (),
    )


def find_run(storage: UPath, named: str, only: str | None = None) -> RunFolder:
    """Return the run that a person names by its id, or by the beginning of it, with or without ``JOB/`` before it.

    ``only`` is the job whose runs are meant.

    Raises:
        StorageError: there is no such run, or several.
    """
    job, _, run_id = named.rpartition("/")
    if job and job not in JOBS:
        expected = f"give a run's id, or JOB/ID; for JOB, expected one of {', '.join(JOBS)}"
        raise StorageError(f"no run {named!r}: {expected}{suggestion(job, JOBS)}").of("job.unknown_kind")
    if not run_id:
        # Every id begins so. A script may have left the id out.
        raise StorageError(f"no run {named!r}: give a run's id, or its beginning").of("run.unknown")
    names = {name: list_names(runs_folder(storage, name)) for name in _jobs_in(storage, job or only)}
    every = [runs_folder(storage, name) / found for name, ids in names.items() for found in ids]
    # A whole id comes first, because it may also be the beginning of another one.
    for is_match in (str.__eq__, str.startswith):
        paths = [path for path in every if is_match(path.name, run_id)]
        if len(paths) > 1:
            some = ", ".join(sorted(f"{path.parent.name}/{path.name}" for path in paths)[:3])
            raise StorageError(
                f"{named!r} is the beginning of {len(paths)} runs, such as {some}: give more of the id"
            ).of("run.ambiguous")
        if paths:
            return RunFolder(paths[0])
    raise StorageError(
        f"storage {str(storage)!r} has no {f'{job or only} run' if job or only else 'run'} {named!r}: "
        f"'rayloom runs list' shows the runs{suggestion(run_id, [path.name for path in every])}"
    ).of("run.unknown")


def versions_of(storage: UPath, run: RunFolder) -> list[str]:
    """Return the published versions whose lineage names a train or compile run, as NAME/VERSION."""
    listed = [version for version in Repository(storage).list_versions() if version.manifest]
    return [
        f"{version.name}/{version.version}"
        for version in listed
        if version.manifest and run.run_id in {_run_id(folder) for folder in _runs_of(version.manifest)}
    ]


def _runs_of(manifest: Manifest) -> list[str]:
    return list(filter(None, (manifest.lineage.train_run, manifest.lineage.compile_run)))


def _run_id(folder: str) -> str:
    return folder.rstrip("/").rpartition("/")[2]


def delete_run(run: RunFolder) -> None:
    """Remove the folder of a run, with its checkpoints and weights.

    Raises:
        StorageError: the run is under way, or the folder cannot be removed.
    """
    if run.status == "running":
        raise StorageError(f"run {run.run_id} is under way: stop it first, with 'rayloom stop {run.run_id}'").of(
            "run.under_way"
        )
    try:
        run.path.fs.rm(run.path.path, recursive=True)
    except OSError as error:
        raise StorageError(f"{str(run.path)!r} cannot be removed ({error}): check its rights").of(
            "run.not_removed"
        ) from error


@dataclass(frozen=True)
class Compared:
    """A key of the recipe, or a figure, of several runs."""

    key: str
    values: tuple[Any, ...]
    """One for each run; ``MISSING`` where a run has no such key."""


@dataclass(frozen=True)
class Comparison:
    """Several runs side by side."""

    runs: list[RunFolder]
    differences: list[Compared]
    """Of the recipes."""
    figures: list[Compared]


def compare_runs(storage: UPath, named: Sequence[str]) -> Comparison:
    """Return in what the recipes of runs differ, and their figures.

    Raises:
        RequestError: fewer than two runs are named.
        StorageError: one of them is not there, or its recipe is damaged.
    """
    if len(named) < 2:
        raise RequestError(f"{f'only {named[0]!r}' if named else 'no run'} is given: give two or more to compare").of(
            "runs.too_few"
        )
    runs = [find_run(storage, name) for name in named]
    figures = [_figures(run) for run in runs]
    names = dict.fromkeys(name for row in figures for name in row)
    return Comparison(
        runs,
        recipe_differences([run.recipe for run in runs]),
        [Compared(name, tuple(row.get(name, MISSING) for row in figures)) for name in names],
    )


def recipe_differences(recipes: Sequence[Mapping[str, Any]]) -> list[Compared]:
    """Return the keys whose values are not the same in all recipes, in the recipes' order."""
    flat = [dict(flatten(recipe)) for recipe in recipes]
    keys = dict.fromkeys(key for recipe in flat for key in recipe)
    compared = [Compared(key, tuple(recipe.get(key, MISSING) for recipe in flat)) for key in keys]
    return [found for found in compared if any(value != found.values[0] for value in found.values)]


def _figures(run: RunFolder) -> dict[str, float | str]:
    """Return the figures of a run's result, and the seconds that each phase of its training took, by dotted keys."""
    metrics = flat_metrics(run.result.metrics) if run.result else {}
    phases = {f"phase_s.{phase}": seconds for phase, seconds in read_curves(run.path).total("phase_s.").items()}
    own = {key: value for key, value in metrics.items() if "." not in key}
    return {**own, **phases, **metrics}  # such as the plan's come last


def flat_metrics(metrics: Mapping[str, Any]) -> dict[str, float | str]:
    """Return the figures of a result by dotted keys, without lists."""
    return {key: value for key, value in flatten(metrics) if isinstance(value, int | float | str)}


def _time_in(run_id: str) -> datetime | None:
    try:
        return datetime.strptime(run_id[:_ID_TIME_LENGTH], _ID_TIME).replace(tzinfo=UTC)
    except ValueError:
        return None
