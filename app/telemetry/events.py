"""``events.jsonl``: what happened to a run besides its steps. Starts, rollbacks, alerts, and how it ended."""

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Literal

from pydantic import BaseModel, Field, ValidationError
from upath import UPath

from app.best_effort import BestEffort
from app.shared_files import read
from app.telemetry.mirror import Mirror

EVENTS_FILE = "events.jsonl"

EventKind = Literal[
    "started", "continued", "rolled_back", "alert", "yielded", "paused", "stopped", "finished", "failed"
]


class Event(BaseModel):
    """One event, a line of the file."""

    time: datetime = Field(default_factory=lambda: datetime.now(UTC))
    kind: EventKind
    message: str
    step: int | None = None
    """Optimizer steps so far."""
    epoch: int | None = None


class EventLog:
    """Appends events to the file of a run, however often the run goes on. Errors never stop training."""

    def __init__(self, mirror: Mirror | None) -> None:
        """``mirror`` is the one of the run's folder. None: events are dropped, as in all workers but the first."""
        self._mirror = mirror
        self._writing = BestEffort(f"{EVENTS_FILE} cannot be written")

    def add(self, kind: EventKind, message: str, step: int | None = None, epoch: int | None = None) -> None:
        """Append one event."""
        if self._mirror is not None:
            event = Event(kind=kind, message=message, step=step, epoch=epoch)
            self._writing(partial(self._append, self._mirror, event.model_dump_json(exclude_none=True)))

    def _append(self, mirror: Mirror, line: str) -> None:
        path = mirror.fetch(EVENTS_FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def read_events(run_folder: UPath) -> list[Event]:
    """Return the events of a run, the oldest first. A torn last line is left out."""
    return list(_parse((read(run_folder / EVENTS_FILE) or b"").decode(errors="replace")))


def _parse(text: str) -> Iterator[Event]:
    for line in text.splitlines():
        try:
            yield Event.model_validate_json(line)
        except ValidationError:
            continue
