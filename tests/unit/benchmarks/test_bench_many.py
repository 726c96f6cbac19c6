"""The page on the cost of many runs, versions and models."""

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks.many import __main__ as many


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
