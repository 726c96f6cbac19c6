"""What the READMEs and the page of goals say about the benchmarks is on the benchmarks' pages."""

import re

import pytest

from docs.generated_pages import goals_of, goals_page
from tests.helpers import ROOT
from tests.pages import tables

FIGURE = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?")
LINK = re.compile(r"\]\((benchmarks/.+?)\)")


def test_the_page_of_goals_is_made_of_the_benchmarks_pages() -> None:
    """'make docs' writes it anew."""
    assert (ROOT / "docs/reference/goals.md").read_text(encoding="utf-8") == goals_page()


def test_every_verdict_of_a_page_belongs_to_a_goal() -> None:
    for page in ROOT.glob("benchmarks/*/*.md"):
        verdicts = re.findall(r"\| (?:reached|\*\*missed\*\*|open) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
        goals = goals_of(page)
        assert len(goals) == len(verdicts)
        assert all(goal.what and goal.goal and goal.reached for goal in goals), page


def rows_of_the_readme() -> list[list[str]]:
    """The rows of its table of figures."""
    (header, *rows) = next(table for table in tables(ROOT / "README.md") if table[0][0] == "job")
    assert header == ["job", "compared with", "figures", "where Rayloom loses"]
    return rows


@pytest.mark.parametrize("row", rows_of_the_readme(), ids=lambda row: row[0].partition("]")[0].strip("["))
def test_a_figure_of_the_readme_is_on_the_page_that_its_row_links_to(row: list[str]) -> None:
    text = " ".join(row)
    pages = [(ROOT / link).read_text(encoding="utf-8") for link in LINK.findall(text)]
    assert pages
    measured = {number_of(figure) for page in pages for figure in FIGURE.findall(page)}
    for figure in FIGURE.findall(LINK.sub("]", text)):
        digits = len(figure.partition(".")[2])
        assert number_of(figure) in {round(number, digits) for number in measured}, figure


def number_of(figure: str) -> float:
    return float(figure.replace(",", ""))


def test_the_readme_has_at_most_eight_rows_of_figures() -> None:
    assert 0 < len(rows_of_the_readme()) <= 8


def test_the_list_of_benchmarks_has_every_command_and_page_with_times_that_a_page_holds() -> None:
    readme = ROOT / "benchmarks/README.md"
    (header, *rows) = next(tables(readme))
    assert header == ["command", "page", "proves", "costs"]
    targets = re.findall(r"^(bench-[\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {f"make {target}" for target in targets} <= {row[0] for row in rows}
    linked = [[readme.parent / link for link in re.findall(r"\]\((.+?)\)", row[1])] for row in rows]
    assert {page for pages in linked for page in pages} == set(readme.parent.glob("*/*.md"))
    for (*_, costs), pages in zip(rows, linked, strict=True):
        text = "".join(page.read_text(encoding="utf-8") for page in pages)
        assert all(f"{figure} minutes" in text for figure in re.findall(r"([\d.]+) minutes", costs))
