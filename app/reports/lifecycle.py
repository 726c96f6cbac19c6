"""The page of a lifecycle: its parts, each with its figures and a link to its own page."""

import json

from upath import UPath

from app.errors import StorageError
from app.pages.content import State
from app.pages.page import Page
from app.pages.words import duration, number
from app.reports.run_folder import RunFolder, cost_of, headline, link_to_run
from app.reports.versions import facts_of, trail_of
from app.repository.repository import Repository
from app.runs import folder_of_run
from app.shared_files import read
from app.storage import write_atomically
from app.telemetry.judgement import Judgement
from app.telemetry.usage import Usage

_PARTS_FILE = "parts.json"
JOBS = ("tune", "train", "compile", "deploy")


def note_part(run_folder: UPath, job: str, run_id: str) -> None:
    """Note which run is a part of the lifecycle, before it begins."""
    parts = parts_of(run_folder) | {job: run_id}
    write_atomically(run_folder / _PARTS_FILE, json.dumps(parts, indent=1).encode())


def lifecycle_page(path: UPath) -> Page:
    """Return the page of the lifecycle in this folder. It may be under way."""
    run = RunFolder(path)
    parts = {job: RunFolder(folder_of_run(run.storage, job, run_id)) for job, run_id in parts_of(path).items()}
    page = Page(f"{run.recipe.get('name', run.run_id)}, from data to an endpoint", run.state)
    if run.result and run.result.error:
        page.add_error(run.result.error)
    _add_verdicts(page, parts)
    if figures := _figures(run, parts):
        page.add_figures(figures)
    page.add_heading("Parts")
    rows = [_row(job, parts[job], run) for job in JOBS if job in parts]
    page.add_table(["part", "state", "time", "result", "run"], rows, is_list=True)
    _add_time(page, parts)
    _add_version(page, parts, run.storage)
    page.add_heading("Recipe")
    page.add_code(run.recipe_text, "Show the recipe that it began with")
    return page


def _add_verdicts(page: Page, parts: dict[str, RunFolder]) -> None:
    """Add the verdicts of compile and training."""
    results = {job: parts[job].result for job in ("compile", "train") if job in parts}
    metrics = {job: result.metrics for job, result in results.items() if result}
    found = [
        (metrics.get("compile", {}).get("accuracy") or {}).get("judgement"),
        metrics.get("train", {}).get("judgement"),
    ]
    for judgement in map(Judgement.model_validate, filter(None, found)):
        page.add_verdict(judgement.verdict, judgement.mood, judgement.basis)


def _figures(run: RunFolder, parts: dict[str, RunFolder]) -> dict[str, object]:
    figures: dict[str, object] = {}
    compiled = parts["compile"].result if "compile" in parts else None
    # A score on rows that chose nothing is more reliable, so it comes first.
    if (published := compiled and compiled.metrics.get("accuracy")) and published.get("score"):
        figures[f"{published['split']} {published['score']['metric'].replace('_', ' ')}"] = number(
            published["score"]["value"]
        )
    trained = parts["train"].result if "train" in parts else None
    for name, value in trained.metrics.items() if trained else ():
        if name.startswith("val_") and name != "val_loss" and value is not None:
            figures[f"validation {name.removeprefix('val_').replace('_', ' ')}"] = number(value)
    deployed = parts["deploy"].result if "deploy" in parts else None
    if deployed and "model" in deployed.artifacts:
        figures["version"] = deployed.artifacts["model"]
    if run.result:
        figures["time"] = duration(run.result.duration_s)
    return figures


def _row(job: str, part: RunFolder, lifecycle: RunFolder) -> list[object]:
    """Return the facts of a part. One that was refused before it began has no folder: the lifecycle has its error."""
    if not part.path.exists() and lifecycle.result:
        return [job, State("refused", "bad"), "", lifecycle.result.error or "", ""]
    seconds = duration(part.result.duration_s) if part.result else ""
    return [job, part.state, seconds, headline(part.result) if part.result else "", link_to_run(job, part.run_id)]


def _add_time(page: Page, parts: dict[str, RunFolder]) -> None:
    ended = {job: parts[job].result for job in JOBS if job in parts}
    seconds = {job: result.duration_s for job, result in ended.items() if result}
    page.add_heading("Time and cost")
    page.add_bars(seconds, duration)
    usage: list[Usage] = parts["train"].usage if "train" in parts else []
    page.add_facts({f"training's {name}": value for name, value in cost_of(usage).items()})


def _add_version(page: Page, parts: dict[str, RunFolder], storage: UPath) -> None:
    compiled = parts["compile"].result if "compile" in parts else None
    if compiled is None or "model" not in compiled.artifacts:
        return
    name, _, version = compiled.artifacts["model"].rpartition("/")
    page.add_heading(f"{name}/{version}")
    try:
        manifest = Repository(storage).manifest(name, int(version))
    except StorageError as error:  # it was deleted since
        page.add_error(str(error))
        return
    page.add_trail(trail_of(manifest, storage))
    page.add_facts(facts_of(manifest))


def parts_of(run_folder: UPath) -> dict[str, str]:
    """Return the id of each part of a lifecycle that has begun, by its job."""
    parts: dict[str, str] = json.loads(read(run_folder / _PARTS_FILE) or b"{}")
    return parts
