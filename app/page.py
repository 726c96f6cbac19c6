"""A report page: tables and plots in one HTML file that needs no network."""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from upath import UPath

from app.storage import write_atomically

_STYLE = (
    "body{font-family:sans-serif;max-width:75rem;margin:2rem auto}td,th{padding:.2rem .8rem;text-align:left}"
    "td{vertical-align:top}"
)


class Page:
    """A page, built from the top down. Text is escaped."""

    def __init__(self, title: str) -> None:
        self._title = html.escape(title)
        self._parts = [f"<h1>{self._title}</h1>"]
        self._has_script = False

    def add_heading(self, text: str) -> None:
        """Add a heading below the title."""
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def add_text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(f"<p>{html.escape(text)}</p>")

    def add_facts(self, facts: Mapping[str, object]) -> None:
        """Add a table of names and values."""
        self._add_table(f"<th>{html.escape(name)}</th>{_cells([value])}" for name, value in facts.items())

    def add_table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Add a table with a header."""
        head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
        self._add_table([head, *map(_cells, rows)])

    def add_figure(self, figure: Any) -> None:
        """Add a Plotly figure. The first one includes Plotly's script, which has several MB."""
        self._parts.append(str(figure.to_html(full_html=False, include_plotlyjs=not self._has_script)))
        self._has_script = True

    def write(self, path: UPath) -> None:
        """Write the page atomically."""
        body = "\n".join(self._parts)
        page = (
            f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{self._title}</title>"
            f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
        )
        write_atomically(path, page.encode())

    def _add_table(self, rows: Iterable[str]) -> None:
        self._parts.append(f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>")


def _cells(values: Iterable[object]) -> str:
    return "".join(f"<td>{html.escape(str(value))}</td>" for value in values)
