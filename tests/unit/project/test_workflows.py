"""GitHub's workflows run what exists, with fixed versions, few permissions and an end."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def read(file: Path) -> dict[str, Any]:
    workflow: dict[str, Any] = yaml.load(file.read_text(encoding="utf-8"), yaml.BaseLoader)  # 'on' is no boolean here
    return workflow


def test_the_gate_runs_for_each_change_and_the_long_tests_run_each_night() -> None:
    gate, nightly = (read(ROOT / f".github/workflows/{name}.yml") for name in ("gate", "nightly"))
    assert {"push", "pull_request"} == {*gate["on"]}
    assert gate["jobs"]["checks"]["with"]["command"] == ".ci/run"
    assert "schedule" in nightly["on"]
    assert nightly["jobs"]["tests"]["strategy"]["matrix"]["command"] == ["make test-slow", "make test-faults"]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_pins_actions_asks_for_little_and_ends(file: Path) -> None:
    used = re.findall(r"uses: (?!\./)(.+)", file.read_text(encoding="utf-8"))
    assert [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", action)] == []
    workflow = read(file)
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        assert job["permissions"] == {"contents": "read"}
        assert "timeout-minutes" in job or job["uses"] == "./.github/workflows/debian.yml"
