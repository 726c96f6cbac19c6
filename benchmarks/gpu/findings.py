"""Measured figures, and the outcomes of steps as stored in ``results.json``."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from app.storage import to_path, write_atomically

Status = Literal["passed", "failed", "timed out", "not run"]


class Figure(BaseModel):
    """One measured number, and the reference that it is compared with."""

    name: str
    value: float | str
    unit: str = ""
    reference: float | None = None
    """The reference, in the same unit."""
    source: str = ""
    """Where ``reference`` comes from, such as ``floor`` or ``planner``."""
    reached: bool | None = None
    """Whether the figure reached its goal. None: it has no goal."""


Record = Callable[[Figure], None]
"""Stores a figure immediately, so that a step that is killed later does not lose it."""


class Outcome(BaseModel):
    """The outcome of one step."""

    step: str
    status: Status
    seconds: float = 0.0
    figures: list[Figure] = []
    reason: str = ""
    """Why the step failed or did not run: the last lines of its log, or a sentence."""


class Results(BaseModel):
    """The results of one or more runs on one machine."""

    date: str
    device: str
    """torch's name of the GPU, or ``cpu``."""
    card: str
    """The catalogue's name of the hardware whose data sheet gives the floors."""
    versions: str
    outcomes: list[Outcome] = []

    def outcome(self, step: str) -> Outcome | None:
        """Return the outcome of ``step``; None if there is none yet."""
        return next((outcome for outcome in self.outcomes if outcome.step == step), None)

    def add(self, outcome: Outcome) -> None:
        """Add an outcome. It replaces an earlier one of the same step."""
        self.outcomes = [*(kept for kept in self.outcomes if kept.step != outcome.step), outcome]

    def save(self, file: Path) -> None:
        """Write ``results.json`` atomically."""
        write_atomically(to_path(file), self.model_dump_json(indent=1).encode())


def append_figure(file: Path, figure: Figure) -> None:
    """Append a figure to a file of JSON lines."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(figure.model_dump_json() + "\n")


def read_figures(file: Path) -> list[Figure]:
    """Return the figures of a file of JSON lines. An incomplete last line, left by a killed process, is ignored."""
    if not file.exists():
        return []
    whole = file.read_text(encoding="utf-8").rpartition("\n")[0]
    return [Figure.model_validate_json(line) for line in whole.splitlines()]
