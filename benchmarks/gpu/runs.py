"""Runs of ``app.training`` in this process, trained as by ``python -m app.training``."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upath import UPath

from app.runs import RESULT_FILE
from app.storage import to_path
from app.telemetry.record import parse_line
from app.training.__main__ import main as train


@dataclass(frozen=True)
class TrainedRun:
    """A finished run."""

    folder: UPath

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The records of its steps."""
        lines = (self.folder / "metrics.jsonl").read_bytes().splitlines()
        return [record for record in map(parse_line, lines) if record and "loss" in record]

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [step["loss"] for step in self.steps]


def trained(recipe: str, overrides: Sequence[str], storage: Path) -> TrainedRun:
    """Train and return the run: the only one in ``storage``, or the resumed one.

    Raises:
        RuntimeError: training failed; the log says why.
    """
    if train([recipe, *overrides, f"storage={storage}"]):
        raise RuntimeError(f"training {recipe} failed: its lines are above")
    results = sorted(to_path(storage).glob(f"runs/train/*/{RESULT_FILE}"), key=lambda file: file.stat().st_mtime)
    return TrainedRun(results[-1].parent)
