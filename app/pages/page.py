"""A page that a person opens after a run: one HTML file that needs no network."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from upath import UPath

from app.pages.assets import STYLE, read_asset
from app.pages.content import Chart, Link, Mood, State
from app.pages.words import percent
from app.storage import write_atomically

REPORT_FILE = "report.html"
"""The page of a run, in the run's folder."""

_NUMBER = re.compile(r"[-+−]?[\d.,]+(e[-+]?\d+)?( ?[%a-zA-Zµ]{1,3}(/s)?)?")
_SHORT_CELL, _LONG_CELL = 20, 60
"""Characters up to which a column's cells stay on one line, and from which they get room for several."""


@dataclass
class _Section:
    heading: str | None
    blocks: list[Markup] = field(default_factory=list)


@dataclass(frozen=True)
class _Column:
    name: str | Link
    kind: str
    """A class of the style: number, short, long or none of them."""

    @property
    def attributes(self) -> Markup:
        return Markup(' class="{}"').format(self.kind) if self.kind else Markup("")


class Page:
    """Parts of a page, from the top down. Text is shown as text, never as markup."""

    def __init__(self, title: str, state: State | None = None, links: Sequence[Link | Markup] = ()) -> None:
        self._title, self._state, self._links = title, state, list(links)
        self._sections = [_Section(None)]
        self._has_charts = False

    def add_heading(self, text: str) -> None:
        """Begin a section."""
        self._sections.append(_Section(text))

    def add(self, block: Markup) -> None:
        """Add what is markup already, such as a form."""
        self._sections[-1].blocks.append(block)

    def add_text(self, text: object) -> None:
        """Add a paragraph."""
        self._add("text", text)

    def add_error(self, text: str) -> None:
        """Add a paragraph that stands out: why a run failed."""
        self._add("error", text)

    def add_verdict(self, verdict: str, mood: Mood, basis: str) -> None:
        """Add the verdict of a run, and a sentence on the data that it is based on."""
        self._add("verdict", verdict, mood, basis)

    def add_code(self, text: str, summary: str | None = None) -> None:
        """Add preformatted text; with ``summary``, folded under it."""
        self._add("code", text, summary)

    def add_figures(self, figures: Mapping[str, object]) -> None:
        """Add the few figures that a person looks for first, in large type."""
        self._add("figures", figures)

    def add_facts(self, facts: Mapping[str, object]) -> None:
        """Add a table of names and values."""
        self._add("facts", facts)

    def add_table(
        self,
        columns: Sequence[str | Link],
        rows: Iterable[Sequence[object]],
        marked: Collection[int] = (),
        is_list: bool = False,
    ) -> None:
        """Add a table with a name over each column.

        Args:
            marked: indices of rows that stand out.
            is_list: on a phone, write the cells of a row below each other. Other tables scroll there.
        """
        listed = [list(row) for row in rows]
        kinds = [_Column(name, _kind_of([row[index] for row in listed])) for index, name in enumerate(columns)]
        cells = [
            {"cells": list(zip(row, kinds, strict=True)), "is_marked": index in marked}
            for index, row in enumerate(listed)
        ]
        caption = self._sections[-1].heading or self._title
        self._add("table", caption, kinds, cells, is_list)

    def add_bars(self, amounts: Mapping[str, float], words: Callable[[float], str] | None = None) -> None:
        """Add a bar for each amount, with its words and its share beside it. A whole track is the sum of all."""
        whole = sum(amounts.values()) or 1.0
        rows = [
            (name, percent(amount / whole), f"{words(amount)}, " if words else "") for name, amount in amounts.items()
        ]
        self._add("bars", rows)

    def add_matrix(self, labels: Sequence[str], counts: Sequence[Sequence[int]]) -> None:
        """Add a confusion matrix. ``counts[i][j]``: samples of label i for which label j was predicted."""
        rows = [
            {
                "label": labels[true],
                "cells": [
                    {"count": count, "share": f"{count / (sum(row) or 1):.3f}", "is_right": true == predicted}
                    for predicted, count in enumerate(row)
                ],
            }
            for true, row in enumerate(counts)
        ]
        self._add("matrix", self._sections[-1].heading or "Confusion matrix", labels, rows)

    def add_trail(self, steps: Mapping[str, object]) -> None:
        """Add a chain of steps, each of which led to the next one."""
        self._add("trail", steps)

    def add_charts(self, *charts: Chart) -> None:
        """Add charts side by side where the screen is wide."""
        self._has_charts = True
        self._add("charts", charts)

    def to_html(self) -> str:
        """Return the whole page."""
        scripts = [read_asset("charts.js")] * self._has_charts
        return (
            _templates()
            .get_template("page.html.j2")
            .render(
                title=self._title,
                state=self._state,
                links=self._links,
                style=Markup(STYLE + read_asset("report.css")),  # noqa: S704 # our own files
                sections=[section for section in self._sections if section.blocks],
                scripts=[Markup(script) for script in scripts],  # noqa: S704
            )
        )

    def write(self, path: UPath) -> None:
        """Write the page."""
        write_atomically(path, self.to_html().encode())

    def _add(self, macro: str, *arguments: object) -> None:
        blocks: Any = _templates().get_template("blocks.html.j2").module
        self.add(Markup(getattr(blocks, macro)(*arguments)))  # noqa: S704 # it escapes


@cache
def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("app.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _kind_of(cells: Sequence[object]) -> str:
    """Return how a column is set: numbers to the right, short text on one line, long text broken into lines."""
    texts = [str(cell) for cell in cells if str(cell)]
    if texts and all(_NUMBER.fullmatch(text) for text in texts):
        return "number"
    longest = max(map(len, texts), default=0)
    return "long" if longest > _LONG_CELL else "short" if longest <= _SHORT_CELL else ""
