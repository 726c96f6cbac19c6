"""The page of a run, whatever its job."""

from collections.abc import Callable

from upath import UPath

from app.pages.page import Page
from app.reports.deployment import deployment_page
from app.reports.lifecycle import lifecycle_page
from app.reports.training import training_page

_PAGES: dict[str, Callable[[UPath], Page]] = {
    "train": training_page,
    "deploy": deployment_page,
    "lifecycle": lifecycle_page,
}
"""By job. Tune and compile write theirs themselves, from what they have in memory."""


def has_page(job: str) -> bool:
    """Return whether the page of such a run is made from its folder, also while the run goes on."""
    return job in _PAGES


def page_of(run_folder: UPath) -> Page:
    """Return the page of a run. Raises KeyError if its job has none that is made from the folder."""
    return _PAGES[run_folder.parent.name](run_folder)
