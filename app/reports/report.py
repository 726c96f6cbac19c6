"""The page of a run, whatever its job."""

from collections.abc import Callable

from upath import UPath

from app.pages.page import Page
from app.pages.words import duration, number
from app.reports.catalog import flat_metrics
from app.reports.deployment import deployment_page
from app.reports.lifecycle import lifecycle_page
from app.reports.run_folder import RunFolder
from app.reports.training import training_page

_PAGES: dict[str, Callable[[UPath], Page]] = {
    "train": training_page,
    "deploy": deployment_page,
    "lifecycle": lifecycle_page,
}
"""By job. Tune and compile write theirs themselves at the end, from what they have in memory."""


def page_of(run_folder: UPath) -> Page:
    """Return the page of a run, from what lies in its folder. The run may be under way."""
    return _PAGES.get(run_folder.parent.name, _plain_page)(run_folder)


def _plain_page(path: UPath) -> Page:
    """Return the page of a run whose job has none of its own here."""
    run = RunFolder(path)
    page = Page(f"{run.job}, {run.run_id}", run.state)
    if result := run.result:
        if result.error:
            page.add_error(result.error)
        figures = {name: number(value) for name, value in flat_metrics(result.metrics).items()}
        page.add_facts({**figures, "time": duration(result.duration_s), **result.artifacts})
    page.add_heading("Recipe")
    page.add_code(run.recipe_text, "Show the whole recipe, with every default")
    return page
