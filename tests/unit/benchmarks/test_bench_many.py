"""The page on the cost of many runs, versions and models."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks.many import __main__ as many
from benchmarks.many.nodes import NodeCost, Part


def test_a_page_keeps_what_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, rows = tmp_path / "RESULTS.md", {"Runs": "| runs |", "Versions": "| first |"}
    monkeypatch.setattr(many, "_SECTIONS", {title: lambda title=title: rows[title] for title in rows})
    monkeypatch.setattr(many, "_s3", nullcontext)
    monkeypatch.setattr(sys, "argv", ["many", "--results", str(page)])
    many.main()
    rows["Runs"], rows["Versions"] = "never", "| second |"
    monkeypatch.setattr(sys, "argv", ["many", "--results", str(page), "--sections", "Versions"])
    many.main()
    written = page.read_text(encoding="utf-8")
    assert written.index("## Runs") < written.index("| runs |") < written.index("## Versions")
    assert written.index("## Versions") < written.index("| second |")
    assert "first" not in written
    assert written.count("# The cost of many runs") == 1


@pytest.mark.parametrize(
    ("is_shared", "bytes_of", "verdict"),
    [
        (True, lambda nodes: 7 * nodes, "x 1.0, constant"),
        (True, lambda nodes: nodes**2, "x 100, **grows**"),
        (False, lambda nodes: nodes, "x 100, **grows**"),
        (False, lambda _: 7, "x 1.0, constant"),
    ],
)
def test_a_part_grows_if_a_node_costs_more_beside_others(
    is_shared: bool, bytes_of: Callable[[int], int], verdict: str
) -> None:
    assert Part("part", "1 s", is_shared, lambda nodes: NodeCost(1.0, bytes_of(nodes))).row()[-2] == verdict
