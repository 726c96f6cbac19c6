"""A run's folder, copied to a tracking server while the run goes on.

The folder is the queue: what a server did not take is still there, and the next try goes on where the last one came to.
So a server that is away costs training nothing.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from upath import UPath

from app.artifacts import METRICS_FILE
from app.shared_files import GrowingFile, read
from app.storage import write_atomically
from app.telemetry.record import numbers, parse_line, tag_of
from app.tracking.tracker import Point, RunEnd, RunFacts, Tracker

FILES = (
    "config.yaml", "result.json", "report.html", "best.yaml", "data.json", "evaluation.json", "events.jsonl",
    "trials.csv", "usage.json",
)  # fmt: skip
"""What is copied of a run's folder, if it is there. Weights and checkpoints stay in storage."""
_MAX_FILE_BYTES = 16 << 20
_MAX_STEPS = 80
"""Steps in one call, evenly spaced if more have come. MLflow takes 1,000 numbers at once, and a step has about ten."""


class Progress(BaseModel):
    """How far a run is copied: a file in its folder, so that a resumed run goes on with the same copy."""

    run_id: str
    """The id in the tracker."""
    step: int = 0
    """The last step whose numbers are there."""
    epoch: int = 0
    left_out: int = 0
    """Steps that were left out because too many came at once."""
    has_ended: bool = False


class RunCopy:
    """One run in one tracker."""

    def __init__(self, folder: UPath, tracker: Tracker, facts: Callable[[], RunFacts]) -> None:
        """``facts`` is called when the tracker opens the run."""
        self._folder, self._tracker, self._facts = folder, tracker, facts
        self._start_over()

    def _start_over(self) -> None:
        """Go on from what the tracker has for sure."""
        self._lines = GrowingFile(self._folder / METRICS_FILE)
        self._steps: list[Point] = []
        self._epochs: list[Point] = []
        self._progress = read_progress(self._folder, self._tracker)
        self._is_open = False

    @property
    def progress(self) -> Progress | None:
        """How far the run is copied; None before the tracker has opened it for the first time."""
        return self._progress

    def count_waiting(self) -> int:
        """Return the number of records that the tracker may lack. Any thread may call this."""
        lines = read(self._folder / METRICS_FILE) or b""
        return len(list(_new_entries(lines, read_progress(self._folder, self._tracker))))

    def advance(self) -> None:
        """Copy what is new, in one call. Raise what the tracker raises: a later call tries again."""
        progress = self._open()
        self._read_lines()
        if not self._steps and not self._epochs:
            return
        # Only steps are thinned out. Epochs are few, and people compare runs by them.
        stride = -(-len(self._steps) // _MAX_STEPS) or 1
        steps = self._steps[::-stride][::-1]  # the last one is always there
        self._tracker.log(progress.run_id, sorted([*steps, *self._epochs], key=lambda point: point.step))
        self._progress = progress.model_copy(
            update={
                "step": max([progress.step, *(point.step for point in steps)]),
                "epoch": max([progress.epoch, *(int(point.values["epoch/epoch"]) for point in self._epochs)]),
                "left_out": progress.left_out + len(self._steps) - len(steps),
            }
        )
        self._steps, self._epochs = [], []
        # Otherwise a process that is killed would skip points that the server never got.
        if self._tracker.confirms_points:
            self._save(self._progress)

    def finish(self, ended: Callable[[list[Path]], RunEnd]) -> None:
        """Copy the rest, and end the run in the tracker. ``ended`` is called with the files of the run's folder."""
        self.advance()
        assert self._progress is not None
        try:
            with tempfile.TemporaryDirectory(prefix="rayloom-tracking-") as temporary:
                self._tracker.close(self._progress.run_id, ended(list(self._files(Path(temporary)))))
        except Exception:
            # What was logged since the last close may be lost, so it is read and logged again.
            if not self._tracker.confirms_points:
                self._start_over()
            raise
        self._is_open = False
        self._save(self._progress.model_copy(update={"has_ended": True}))

    def _open(self) -> Progress:
        """Return how far the run is copied, after opening it once."""
        before = self._progress
        if before is None or not self._is_open:
            facts = self._facts()
            run_id = self._tracker.open(facts, before.run_id if before else None)
            if before is None or before.run_id != run_id:  # of another server, or lost by it: all is copied anew
                before = Progress(run_id=run_id)
                self._lines, self._steps, self._epochs = GrowingFile(self._folder / METRICS_FILE), [], []
            # Saved before the description, so that a try that fails there does not create another run.
            self._save(before.model_copy(update={"has_ended": False}))
            self._tracker.describe(run_id, facts)
            self._is_open = True
        assert self._progress is not None
        return self._progress

    def _read_lines(self) -> None:
        """Add new lines to those that wait. A run that went back repeats steps, which the tracker has already."""
        lines, is_new_file = self._lines.new_lines()
        if is_new_file:
            self._steps, self._epochs = [], []
        for kind, entry in _new_entries(lines, self._progress):
            values = {tag_of(kind, name): value for name, value in numbers(entry).items()}
            del values[f"{kind}/step"]
            (self._epochs if kind == "epoch" else self._steps).append(Point(entry["step"], values))

    def _files(self, temporary: Path) -> Iterator[Path]:
        """Yield local copies of the files that are there."""
        for name in FILES:
            content = read(self._folder / name)
            if content is not None and len(content) <= _MAX_FILE_BYTES:
                (temporary / name).write_bytes(content)
                yield temporary / name

    def _save(self, progress: Progress) -> None:
        self._progress = progress
        write_atomically(_progress_file(self._folder, self._tracker), progress.model_dump_json().encode())


def read_progress(folder: UPath, tracker: Tracker) -> Progress | None:
    """Return how far the run in a folder is copied; None if the tracker does not know it yet."""
    try:
        return Progress.model_validate_json(read(_progress_file(folder, tracker)) or b"")
    except ValidationError:
        return None


def _new_entries(lines: bytes, progress: Progress | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the records that are not copied yet, each with its kind: step or epoch."""
    for entry in filter(None, map(parse_line, lines.splitlines())):
        kind = "epoch" if "val_loss" in entry else "step"
        if entry[kind] > (getattr(progress, kind) if progress else 0):
            yield kind, entry


def _progress_file(folder: UPath, tracker: Tracker) -> UPath:
    return folder / f"tracking_{tracker.name}.json"
