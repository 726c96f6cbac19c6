"""How soon the command line answers: what it imports before it runs a command."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = {"deepspeed", "fastapi", "httpx", "numpy", "onnxruntime", "openvino", "pandas", "pyarrow", "ray", "torch"}


def imported(*arguments: str, **environment: str) -> tuple[set[str], str]:
    """Run the command line. Return the packages that it imported, and what it printed."""
    rayloom = Path(sys.executable).with_name("rayloom")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(rayloom), *arguments],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "100", **environment},
        check=False,
    )
    modules = re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE)
    assert "typer" in modules
    return {module.partition(".")[0] for module in modules}, done.stdout


def test_help_imports_no_slow_package_and_describes_every_command() -> None:
    packages, shown = imported("--help")
    assert not packages & SLOW
    assert "List, show, compare and delete runs." in shown
    assert "Send inputs to a deployed model" in shown


def test_completion_imports_no_slow_package() -> None:
    asked = {"_RAYLOOM_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    packages, shown = imported(**asked, COMP_WORDS="rayloom re")
    assert (packages & SLOW, shown.split()) == (set(), ["resume", "recipes"])
    packages, shown = imported(**asked | {"COMP_CWORD": "2"}, COMP_WORDS="rayloom runs comp")
    assert (packages & (SLOW - {"numpy"}), shown.split()) == (set(), ["compare"])


def test_jobs_and_runs_complete_by_their_names(tmp_path: Path) -> None:
    for name in ("20260101-000000-digits-aaaa", "20260202-000000-digits-bbbb"):
        (tmp_path / "runs/train" / name).mkdir(parents=True)
    asked = {"_RAYLOOM_COMPLETE": "complete_bash", "COMP_CWORD": "3", "RAYLOOM_STORAGE": str(tmp_path)}
    _, shown = imported(**asked, COMP_WORDS="rayloom runs show 2026", RAYLOOM_HOME=str(tmp_path / "home"))
    assert shown.split() == ["20260202-000000-digits-bbbb", "20260101-000000-digits-aaaa"]
    _, shown = imported(**asked | {"COMP_CWORD": "2"}, COMP_WORDS="rayloom submit tr")
    assert shown.split() == ["train"]


@pytest.mark.parametrize(
    "command",
    [
        ["runs", "list"],
        ["models", "list"],
        ["recipes", "show", "recipes/reviews.yaml"],
        ["status"],
        ["predict", "m", "x"],
    ],
    ids=" ".join,
)
def test_what_only_looks_imports_no_framework(command: list[str], tmp_path: Path) -> None:
    packages, _ = imported(*command, RAYLOOM_HOME=str(tmp_path), HOME=str(tmp_path))
    assert not packages & {"deepspeed", "onnxruntime", "openvino", "pandas", "pyarrow", "ray", "torch"}
