"""The README's table of goals matches the benchmarks' pages."""

import re
from pathlib import Path

from tests.helpers import ROOT

_ROW = re.compile(r"^\| \[.+?\]\((benchmarks/.+?)\) \| (\d+) of (\d+) \| (\d+) \|", re.MULTILINE)


def test_the_readme_counts_the_goals_of_every_page_that_has_some_those_most_missed_first() -> None:
    rows = _ROW.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    counted = {page: (int(missed), int(goals)) for page, missed, goals, _ in rows}
    pages = {str(page.relative_to(ROOT)): _goals(page) for page in ROOT.glob("benchmarks/*/*.md")}
    assert counted == {page: (missed, goals) for page, (missed, goals) in pages.items() if goals}
    assert all(int(missed) + int(reached) == int(goals) for _, missed, goals, reached in rows)
    shares = [missed / goals for missed, goals in counted.values()]
    assert shares == sorted(shares, reverse=True)


def _goals(page: Path) -> tuple[int, int]:
    """Return the number of missed goals on a page, and the number of goals with a verdict."""
    verdicts = re.findall(r"\| (reached|\*\*missed\*\*) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return verdicts.count("**missed**"), len(verdicts)
