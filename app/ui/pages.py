"""The pages of ``rayloom ui``: forms and tables in the look of the reports, without a script."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from upath import UPath

from app.pages.content import Link, State
from app.pages.page import REPORT_FILE, Page
from app.pages.words import duration, minute, number
from app.reports.catalog import JOBS, Comparison, RunSummary, group_parts
from app.reports.run_folder import state_of
from app.repository.repository import ListedVersion

_FORGET = Markup('<form method="post" action="{}logout"><button class="link">Forget the token</button></form>')
_LOGIN = Markup(
    '<form class="filters" method="post" action="{}login"><label>Token <input name="token" type="password" '
    'autocomplete="off" required autofocus></label><button class="main">Use the token</button></form>'
)
_RUNS = Markup(
    '<div class="filters"><form class="filters"><label>Job <select name="job">{}</select></label>'
    '<label>Recipe <input name="recipe" type="search" placeholder="all" value="{}"></label><button>Show</button></form>'
    '<form id="compare" action="compare"><button class="main">Compare marked runs</button></form></div>'
)
_BOX = Markup('<input type="checkbox" form="compare" name="run" value="{}" aria-label="Compare {}">')
_OPTION = Markup('<option value="{}"{}>{}</option>')


@dataclass(frozen=True)
class Site:
    """What all pages have in common."""

    storage: UPath
    asks_for_token: bool
    home: str
    """The address of the list of runs, relative to the page, because a proxy may serve it under a path of its own."""

    def page(self, title: str) -> Page:
        """Begin a page."""
        links: list[Link | Markup] = [Link("Runs", self.home), Link("Models", f"{self.home}models")]
        forget = [_FORGET.format(self.home)] * self.asks_for_token
        return Page(title, State(str(self.storage), "good"), [*links, *forget])

    def runs(self, runs: Sequence[RunSummary], job: str | None, recipe: str | None) -> Page:
        """Return the list of runs. ``job`` and ``recipe`` are what it is limited to."""
        page = self.page("Runs")
        names = ("", *JOBS)
        options = [_OPTION.format(name, Markup(" selected") * (name == (job or "")), name or "all") for name in names]
        page.add(_RUNS.format(Markup().join(options), recipe or ""))
        if not runs:
            page.add_text("No runs. 'rayloom submit train RECIPE' makes one.")
            return page
        page.add_table(
            ["", "job", "run", "status", "recipe", "began, UTC", "time", "result"],
            [
                [
                    _Mark(run.key),
                    "↳ " * is_part + run.job,
                    self._report(run.job, run.run_id),
                    state_of(run.status),
                    run.recipe,
                    minute(run.began),
                    "" if run.duration_s is None else duration(run.duration_s),
                    run.headline,
                ]
                for run, is_part in group_parts(runs)
            ],
            is_list=True,
        )
        return page

    def models(self, versions: Sequence[ListedVersion]) -> Page:
        """Return the list of every version of every model."""
        page = self.page("Models")
        if not versions:
            page.add_text("No model is published yet. 'rayloom submit compile RECIPE' makes one.")
            return page
        made = ("created, UTC", "trained by", "compiled by")
        columns = ["model", "aliases", "precision", "engine", "score", "MB", *made]
        page.add_table(columns, [self._version(version) for version in versions], is_list=True)
        return page

    def comparison(self, found: Comparison) -> Page:
        """Return runs side by side."""
        page = self.page("Comparison of runs")
        runs = [self._report(run.job, run.run_id) for run in found.runs]
        page.add_heading("Differences of the recipes")
        if found.differences:
            rows = [[row.key, *map(number, row.values)] for row in found.differences]
            page.add_table(["key", *runs], rows, is_list=True)
        else:
            page.add_text("The recipes are the same.")
        page.add_heading("Results")
        status: list[object] = ["status", *(run.state for run in found.runs)]
        figures: list[list[object]] = [[row.key, *map(number, row.values)] for row in found.figures]
        page.add_table(["figure", *runs], [status, *figures], is_list=True)
        return page

    def refusal(self, error: Exception) -> Page:
        """Return the page that says why there is no other."""
        page = self.page("This cannot be shown")
        page.add_error(str(error))
        return page

    def login(self, error: Exception | None) -> Page:
        """Return the page that asks for the token, with the reason why the one that was given is refused."""
        page = Page("This page asks for its token")
        if error:
            page.add_error(str(error))
        page.add(_LOGIN.format(self.home))
        page.add_text("It is the content of the file that 'rayloom ui' has named.")
        return page

    def _version(self, listed: ListedVersion) -> list[object]:
        name, aliases, manifest = f"{listed.name}/{listed.version}", ", ".join(listed.aliases), listed.manifest
        if manifest is None:
            return [name, aliases, "", "damaged", "", "", "", "", ""]
        key, lineage = manifest.engine_key, manifest.lineage
        made_by = [
            self._report(job, folder.rpartition("/")[2]) if folder else ""
            for job, folder in (("train", lineage.train_run), ("compile", lineage.compile_run))
        ]
        size, score = number(manifest.size_bytes / 1e6), str(manifest.score or "")
        return [name, aliases, key.precision, key.engine, score, size, minute(manifest.created), *made_by]

    def _report(self, job: str, run_id: str) -> Link:
        return Link(run_id, f"{self.home}runs/{job}/{run_id}/{REPORT_FILE}")


@dataclass(frozen=True)
class _Mark:
    """A box that marks a run, as JOB/ID, for the comparison."""

    run: str

    def __html__(self) -> str:
        return _BOX.format(self.run, self.run)

    def __str__(self) -> str:
        return ""
