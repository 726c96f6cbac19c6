"""Two sinks of records: ``metrics.jsonl`` and the progress lines in the job's log."""

import json
import math
import time
from collections.abc import Iterable, Sequence

from upath import UPath

from app.artifacts import METRICS_FILE
from app.best_effort import BestEffort
from app.config import TrainConfig
from app.config.metrics import Selection
from app.storage import to_path, write_atomically
from app.telemetry.mirror import Mirror
from app.training.records import EpochRecord, StepRecord, best_of, is_finite


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
        self._try_write = BestEffort(f"{str(self._path)!r} cannot be written, and waits for the next step")

    def append(self, *records: StepRecord | EpochRecord) -> None:
        """Write one line for each record. Lines that cannot be written are retried with the next record."""
        self._pending += [_text(record) for record in records]
        if self._try_write(self._write):
            self._pending = []

    def restore(self, step: int, epochs: Iterable[EpochRecord]) -> None:
        """Keep the lines of a run that resumes from ``step`` with the records ``epochs``.

        Later steps are dropped, since the run repeats them, and so is a torn last line. Missing lines of ``epochs`` are
        restored from the checkpoint's records.
        """
        kept = [line for line in self._whole_lines() if line.step <= step]
        # A checkpoint may be newer than the file, whose last lines were lost.
        known = {line.epoch for line in kept}
        missing = (_Line(_text(epoch)) for epoch in epochs)
        restored = (line for line in missing if line.epoch not in known)
        self._replace(sorted([*kept, *restored], key=lambda line: line.step))

    def _write(self) -> None:
        # An earlier write may have ended within a line.
        if self._may_be_torn:
            # Whole lines of the failed write are removed as well, because all of it is written again.
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


_PROGRESS_INTERVAL_S = 10.0
_MAX_EPOCH_LINES = 50
"""Maximum lines for quick epochs. An epoch that takes longer than the interval has its own line."""


class Progress:
    """Prints a line every few seconds within an epoch, and one after each epoch."""

    def __init__(
        self,
        config: TrainConfig,
        selection: Selection,
        total_steps: int,
        first_step: int,
        epochs_so_far: Sequence[EpochRecord],
    ) -> None:
        self._selection = selection
        self._config, self._total_steps, self._first_step = config, total_steps, first_step
        self._epochs = list(epochs_so_far)
        self._every = math.ceil(config.epochs / _MAX_EPOCH_LINES)
        self._started = self._printed = time.monotonic()

    def append(self, *records: StepRecord | EpochRecord) -> None:
        """Print the progress of the epoch, unless a line was printed recently, or the result of an epoch."""
        match records:
            case (*_, StepRecord() as last):
                if time.monotonic() - self._printed >= _PROGRESS_INTERVAL_S:
                    self._print_step(last)
            case (*_, EpochRecord() as last):
                self._epochs.append(last)
                is_due = last.epoch % self._every == 0 or last.epoch == self._config.epochs
                if not is_due and time.monotonic() - self._printed < _PROGRESS_INTERVAL_S:
                    return
                is_best = is_finite(last, self._selection) and best_of(self._epochs, self._selection) is last
                self._print_epoch(last, is_best)

    def _print_step(self, record: StepRecord) -> None:
        self._print(
            f"epoch {record.epoch}/{self._config.epochs}  step {record.step:,}/{self._total_steps:,}  "
            f"loss {record.loss:.4f}  {record.samples_per_s:,.0f} samples/s  {self._time_left(record.step)}"
        )

    def _print_epoch(self, record: EpochRecord, is_best: bool) -> None:
        metrics = "  ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
        self._print(
            f"epoch {record.epoch}/{self._config.epochs}  loss {record.train_loss:.4f}  {metrics}"
            f"{' (best)' if is_best else ''}  {record.samples_per_s:,.0f} samples/s  {self._time_left(record.step)}"
        )

    def _time_left(self, step: int) -> str:
        elapsed = time.monotonic() - self._started
        seconds = elapsed / max(step - self._first_step, 1) * (self._total_steps - step)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"

    def _print(self, line: str) -> None:
        self._printed = time.monotonic()
        print(line, flush=True)
