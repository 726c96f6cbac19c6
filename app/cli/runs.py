"""List, show, compare and delete runs."""

import sys
import threading
import time
from typing import Annotated

import typer
from upath import UPath

from app.cli.options import Json, RunId, Storage, chosen_storage
from app.cli.tables import aligned, print_json
from app.config import load_stored_recipe
from app.errors import RequestError, StorageError
from app.figures import figures_of
from app.pages.page import REPORT_FILE
from app.pages.words import duration, minute, number
from app.reports.catalog import (
    RunSummary,
    compare_runs,
    delete_run,
    find_run,
    flat_metrics,
    group_parts,
    list_runs,
    versions_of,
)
from app.reports.run_folder import RunFolder, cost_of
from app.run_log import LOG_FILE
from app.runs import CONFIG_FILE
from app.shared_files import read
from app.telemetry.events import read_events
from app.tracking.process import require_clients

runs = typer.Typer(no_args_is_help=True, help=__doc__)

_POLL_S = 1.0
_TRACK_TIMEOUT_S = 300.0


@runs.command("list")
def list_command(
    job: Annotated[str | None, typer.Option(help="Only runs of this job, such as train.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Only runs of the recipe with this name.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many runs, the newest first.")] = 20,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """List runs, the newest first. The parts of a lifecycle stand below it."""
    root = chosen_storage(storage)
    found = list_runs(root, job, recipe, limit)
    if as_json:
        print_json([run.__dict__ for run in found])
        return
    if not found:
        of = "".join(f" of {kind} {name!r}" for kind, name in (("job", job), ("recipe", recipe)) if name)
        print(f"no runs{of} in {root}: 'rayloom submit train RECIPE' makes one; --storage names another storage")
        return
    head = ("job", "run", "status", "began, UTC", "time", "result")
    print("\n".join(aligned([head, *(_row(run, is_part) for run, is_part in group_parts(found))])))
    print(f"in {root}", file=sys.stderr)


@runs.command()
def show(run_id: RunId, storage: Storage = None, as_json: Json = False) -> None:
    """Show how a run ended, what it cost, what happened in it and what it made."""
    run = find_run(chosen_storage(storage), run_id)
    result = run.result
    if as_json:
        ended = vars(result) if result else {"job": run.job, "run_id": run.run_id}
        print_json({**ended, "status": run.status, "folder": run.path})
        return
    rows = [("run", f"{run.job}/{run.run_id}"), ("status", run.status)]
    if result:
        rows.append(("time", duration(result.duration_s)))
        rows += [("error", result.error)] if result.error else []
        verdict = figures_of(result.job, result.model_dump()).get("verdict")
        rows += [("verdict", verdict)] if verdict else []
        metrics = flat_metrics(result.metrics).items()
        rows += [(name, number(value)) for name, value in metrics if value != verdict]
    if run.job == "train":
        rows += [(name, str(value)) for name, value in cost_of(run.usage).items()]
    rows += [(event.kind.replace("_", " "), event.message) for event in read_events(run.path)]
    rows += list(result.artifacts.items()) if result else []
    if (run.path / REPORT_FILE).exists():
        rows.append(("page", str(run.path / REPORT_FILE)))
    rows.append(("folder", str(run.path)))
    print("\n".join(aligned(rows)))


@runs.command()
def compare(
    run_ids: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Two or more runs.")],
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Show in what the recipes of runs differ, and their figures side by side."""
    found = compare_runs(chosen_storage(storage), run_ids)
    if as_json:
        names = [run.run_id for run in found.runs]
        table = {row.key: dict(zip(names, row.values, strict=True)) for row in (*found.differences, *found.figures)}
        print_json({"status": {run.run_id: run.status for run in found.runs}, **table})
        return
    rows = [("", *(run.run_id for run in found.runs)), ("status", *(run.status for run in found.runs))]
    rows += [(row.key, *map(number, row.values)) for row in (*found.differences, *found.figures)]
    print("\n".join(aligned(rows)))
    if not found.differences:
        print("the recipes are the same")


@runs.command()
def logs(
    run_id: RunId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    storage: Storage = None,
) -> None:
    """Print what a run's job has printed. It lies in storage, so no cluster is needed."""
    root = chosen_storage(storage)
    run = find_run(root, run_id)
    printed = 0
    while True:
        # The status comes before the log, so that the last lines of a run that ends now are printed.
        is_over = run.status != "running"
        content = read(run.path / LOG_FILE)
        if content is None and is_over:
            raise StorageError(f"run {run.run_id} has no {LOG_FILE}: it was made by an earlier version of Rayloom").of(
                "log.missing"
            )
        print((content or b"")[printed:].decode(errors="replace"), end="", flush=True)
        printed = len(content or b"")
        if is_over or not follow:
            return
        time.sleep(_POLL_S)
        run = RunFolder(run.path)


@runs.command()
def track(run_id: RunId, storage: Storage = None) -> None:
    """Copy to the recipe's trackers what they lack of a run that has ended, as after an outage."""
    from app.tracking.__main__ import copy_run, create_trackers  # the clients take a while to import
    from app.tracking.tracked_run import TrackedRun

    run = find_run(chosen_storage(storage), run_id)
    if run.status == "running":
        raise RequestError(f"run {run.run_id} is under way, and its job copies it: wait for its end").of(
            "run.under_way"
        )
    recipe = load_stored_recipe(str(run.path / CONFIG_FILE))
    require_clients(recipe)
    trackers = create_trackers(recipe, run.path)
    if not trackers:
        raise RequestError(f"the recipe of run {run.run_id} has no tracker: add one under tracking, for later runs").of(
            "trackers.none", "tracking"
        )
    for tracker in trackers:
        tracked = TrackedRun(run.path, tracker)
        if tracked.parent and tracked.must_wait:
            raise RequestError(
                f"run {run.run_id} is a part of {tracked.parent.name}, which {tracker.name} does not know yet: "
                f"'rayloom runs track {tracked.parent.name}' first"
            ).of("parent.not_tracked")
    # Already set: copying ends once the trackers have everything.
    has_ended = threading.Event()
    has_ended.set()
    if not copy_run(run.path, trackers, has_ended, _TRACK_TIMEOUT_S):
        raise typer.Exit(1)
    print(f"copied to {', '.join(tracker.name for tracker in trackers)}")


@runs.command()
def delete(
    run_ids: Annotated[list[str], typer.Argument(metavar="RUN...", help="The runs' ids, or their beginnings.")],
    force: Annotated[bool, typer.Option("--force", help="Also runs that published versions came from.")] = False,
    storage: Storage = None,
) -> None:
    """Delete runs, with their checkpoints and weights. Published versions stay."""
    root = chosen_storage(storage)
    found = [find_run(root, run_id) for run_id in run_ids]
    if not force:
        _require_unused(root, found)
    for run in found:
        delete_run(run)
        print(f"deleted {run.job}/{run.run_id}")


def _require_unused(root: UPath, found: list[RunFolder]) -> None:
    """Refuse to delete runs that the lineage of a version names. Raises StorageError."""
    for run in found:
        if made := versions_of(root, run):
            raise StorageError(
                f"{', '.join(made)} came from run {run.run_id}, and its lineage would lead nowhere: delete the version "
                "first with 'rayloom models delete', or give --force"
            ).of("run.in_use")


def _row(run: RunSummary, is_part: bool) -> tuple[str, ...]:
    seconds = "" if run.duration_s is None else duration(run.duration_s)
    return "  " * is_part + run.job, run.run_id, run.status, minute(run.began), seconds, run.headline.partition("\n")[0]
