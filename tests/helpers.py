"""What several tests do: run a command, read its result."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


def run(
    *command: str, environment: dict[str, str] | None = None, timeout: float = 300, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a command of this environment, in the checkout unless told otherwise; its output is captured."""
    return subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        cwd=folder,
        env={**os.environ, **(environment or {}), "PATH": f"{BIN}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


class Tables:
    """Tables that are printed after the tests, whether they passed or not."""

    def __init__(self) -> None:
        self.rendered: list[str] = []

    def add(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
        self.rendered.append("\n".join([title, *lines]))


SGD = ["train.optimizer.name=sgd", "train.optimizer.lr=0.1", "train.optimizer.momentum=0.9", "train.max_steps=20"]


def result_of(output: str) -> dict[str, Any]:
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, output
    return json.loads(lines[0].removeprefix("RESULT "))


def losses(result: dict[str, Any]) -> list[float]:
    lines = (Path(result["artifacts"]["weights"]).parent / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines if "grad_norm" in line]


def train_alone(*overrides: str, processes: int = 1, recipe: str = "recipes/digits.yaml") -> dict[str, Any]:
    done = run(
        *("torchrun", f"--nproc-per-node={processes}", "-m", "app.training", recipe, *overrides),
        environment={"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return result_of(done.stdout)


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.01)
