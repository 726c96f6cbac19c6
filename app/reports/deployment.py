"""The page of a deployment: which versions answer, where they came from, and what took how long."""

import time
from collections.abc import Callable
from typing import ClassVar

from upath import UPath

from app.errors import StorageError
from app.pages.page import Page
from app.pages.words import duration, number
from app.reports.run_folder import RunFolder
from app.reports.versions import facts_of, trail_of
from app.repository.repository import Repository
from app.serving.config import AnyDeployed, LoadedConfig
from app.shared_files import KeptFile


class DeploymentRecord(KeptFile):
    """What a deploy run made the endpoint serve under the recipe's name."""

    file: ClassVar[str] = "deployment.json"
    model: AnyDeployed
    phases_s: dict[str, float]
    """Seconds by what they were spent on."""


class Laps:
    """A clock that is read at the end of each phase."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last = clock, clock()
        self.seconds: dict[str, float] = {}
        """By phase."""

    def end(self, phase: str) -> None:
        """Give the time since the last call, or since the start, to ``phase``."""
        now = self._clock()
        self.seconds[phase], self._last = round(now - self._last, 3), now


def deployment_page(path: UPath) -> Page:
    """Return the page of the deploy run in this folder."""
    run, record = RunFolder(path), DeploymentRecord.load(path)
    page = Page(f"{run.recipe.get('name', run.run_id)}, deployed", run.state)
    result = run.result
    if result and result.error:
        page.add_error(result.error)
    if result and result.status == "succeeded":
        figures = _figures(result.metrics)
        page.add_figures({"version": result.artifacts["model"], **figures, "time": duration(result.duration_s)})
        page.add_facts({name: result.artifacts[key] for name, key in (("HTTP", "http"), ("gRPC", "grpc"))})
    if record:
        _add_versions(page, record.model, run.storage)
        page.add_heading("Time by phase")
        page.add_bars(record.phases_s, duration)
    page.add_heading("Recipe")
    page.add_code(run.recipe_text, "Show the whole recipe, with every default")
    return page


def _figures(metrics: dict[str, object]) -> dict[str, object]:
    return {"seconds until ready": number(metrics.get("ready_s")), "replicas": number(metrics.get("replicas"))}


def _add_versions(page: Page, model: AnyDeployed, storage: UPath) -> None:
    for role, version in _roles(model).items():
        page.add_heading(f"{version.title}, {role}")
        try:
            manifest = Repository(storage).manifest(version.name, version.version)
        except StorageError as error:  # it was deleted since
            page.add_error(str(error))
            continue
        page.add_trail(trail_of(manifest, storage))
        page.add_facts({**facts_of(manifest), "threads of its engine": number(version.threads), **version.bounds})
    if model.summary:
        page.add_heading("Cascade")
        page.add_code(model.summary)


def _roles(model: AnyDeployed) -> dict[str, LoadedConfig]:
    """Return the versions by what they are for."""
    roles: dict[str, LoadedConfig] = {"in production": model.production}
    for name, share in (("canary", model.canary), ("shadow", model.shadow)):
        if share:
            roles[f"{name}, {share.percent:g} % of the requests"] = share.version
    return roles | {f"stage {number} of the cascade": version for number, version in enumerate(model.stages, 1)}
