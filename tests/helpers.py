"""What several tests do: run a command, read its result."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


def run(
    *command: str, environment: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a command of this environment in the checkout; its output is captured."""
    return subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        cwd=ROOT,
        env={**os.environ, **(environment or {}), "PATH": f"{BIN}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


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
