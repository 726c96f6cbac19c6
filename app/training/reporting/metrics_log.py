"""``metrics.jsonl``: one object a step, one an epoch."""

import json
from collections.abc import Iterable

from upath import UPath

from app.storage import to_path, write_atomically
from app.telemetry.mirror import Mirror
from app.training.records import EpochRecord, StepRecord
from app.warnings import Attempts

METRICS_FILE = "metrics.jsonl"


class _Line:
    """A line of the file, with its step and epoch."""

    def __init__(self, text: str) -> None:
        entry = json.loads(text)
        self.text = text
        self.step: int = entry["step"]
        self.epoch: int | None = entry["epoch"] if "val_loss" in entry else None
        """None for the line of a step."""


class MetricsLog:
    """Appends records to ``metrics.jsonl`` in the run's folder."""

    def __init__(self, mirror: Mirror) -> None:
        """``mirror`` is the one of the run's folder. Raises OSError if the file in storage cannot be read."""
        self._path: UPath = to_path(mirror.fetch(METRICS_FILE))
        self._pending: list[str] = []
        """Lines that are not written yet."""
        self._may_be_torn = False
        self._writing = Attempts(f"{str(self._path)!r} cannot be written, and waits for the next step")

    def append(self, *records: StepRecord | EpochRecord) -> None:
        """Write one line for each record. Lines that cannot be written are retried with the next record."""
        self._pending += [_text(record) for record in records]
        if self._writing(self._write):
            self._pending = []

    def restore(self, step: int, epochs: Iterable[EpochRecord]) -> None:
        """Keep the lines of a run that resumes from ``step`` with the records ``epochs``.

        Later steps are dropped, since the run repeats them, and so is a torn last line. Missing lines of ``epochs`` are
        restored from the checkpoint's records.
        """
        kept = [line for line in self._whole_lines() if line.step <= step]
        known = {line.epoch for line in kept}
        lost = (_Line(_text(epoch)) for epoch in epochs)
        self._replace(sorted([*kept, *(line for line in lost if line.epoch not in known)], key=lambda line: line.step))

    def _write(self) -> None:
        if self._may_be_torn:
            self._replace([line for line in self._whole_lines() if line.text not in self._pending])
        self._may_be_torn = True
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in self._pending)
        self._may_be_torn = False

    def _whole_lines(self) -> list[_Line]:
        if not self._path.exists():
            return []
        lines = map(_whole_line, self._path.read_text(encoding="utf-8").splitlines())
        return [line for line in lines if line is not None]

    def _replace(self, lines: Iterable[_Line]) -> None:
        write_atomically(self._path, "".join(f"{line.text}\n" for line in lines).encode())


def _text(record: StepRecord | EpochRecord) -> str:
    return record.model_dump_json(exclude_none=True)


def _whole_line(text: str) -> _Line | None:
    """Return the line, or None if it is torn."""
    try:
        return _Line(text)
    except (KeyError, ValueError):
        return None
