"""Progress as a person reads it in the job's log."""

import time
from collections.abc import Sequence

from app.config import TrainConfig
from app.training.records import EpochRecord, StepRecord, best_of

_INTERVAL_S = 10.0


class Progress:
    """Prints a line every few seconds within an epoch, and one for each epoch."""

    def __init__(
        self, config: TrainConfig, total_steps: int, first_step: int, epochs_so_far: Sequence[EpochRecord]
    ) -> None:
        self._config, self._total_steps, self._first_step = config, total_steps, first_step
        self._epochs = list(epochs_so_far)
        self._started = self._printed = time.monotonic()

    def append(self, *records: StepRecord | EpochRecord) -> None:
        """Print where the epoch stands, unless a line was printed just now; or what an epoch brought."""
        match records:
            case (*_, StepRecord() as last):
                if time.monotonic() - self._printed >= _INTERVAL_S:
                    self._print_step(last)
            case (*_, EpochRecord() as last):
                self._epochs.append(last)
                self._print_epoch(last, is_best=best_of(self._epochs, self._config) is last)

    def _print_step(self, record: StepRecord) -> None:
        self._print(
            f"epoch {record.epoch}/{self._config.epochs}  step {record.step:,}/{self._total_steps:,}  "
            f"loss {record.loss:.4f}  {record.samples_per_s:,.0f} samples/s  {self._time_left(record.step)}"
        )

    def _print_epoch(self, record: EpochRecord, is_best: bool) -> None:
        perplexity = "" if record.val_perplexity is None else f"val_perplexity {record.val_perplexity:.2f}  "
        self._print(
            f"epoch {record.epoch}/{self._config.epochs}  loss {record.train_loss:.4f}  val_loss {record.val_loss:.4f}"
            f"  {perplexity}val_accuracy {record.val_accuracy:.4f}{' (best)' if is_best else ''}  "
            f"{record.samples_per_s:,.0f} samples/s  {self._time_left(record.step)}"
        )

    def _time_left(self, step: int) -> str:
        elapsed = time.monotonic() - self._started
        seconds = elapsed / max(step - self._first_step, 1) * (self._total_steps - step)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"

    def _print(self, line: str) -> None:
        self._printed = time.monotonic()
        print(line, flush=True)
