"""Progress as a person reads it in the job's log."""

import math
import time

from app.training.coordination.exchange import Exchanged
from app.training.records import EpochRecord, StepRecord

_INTERVAL_S = 10.0


class Progress:
    """Prints a line every few seconds within an epoch, and one for each epoch."""

    def __init__(self, epochs: int, total_steps: int, first_step: int) -> None:
        self._epochs, self._total_steps, self._first_step = epochs, total_steps, first_step
        self._started = self._printed = time.monotonic()
        self._warned = -math.inf

    def step(self, record: StepRecord) -> None:
        """Print where the epoch stands, unless a line was printed just now."""
        if time.monotonic() - self._printed < _INTERVAL_S:
            return
        self._print(
            f"epoch {record.epoch}/{self._epochs}  step {record.step:,}/{self._total_steps:,}  loss {record.loss:.4f}  "
            f"{record.samples_per_s:,.0f} samples/s  {self._time_left(record.step)}"
        )

    def epoch(self, record: EpochRecord, is_best: bool) -> None:
        """Print what the epoch brought."""
        perplexity = "" if record.val_perplexity is None else f"val_perplexity {record.val_perplexity:.2f}  "
        self._print(
            f"epoch {record.epoch}/{self._epochs}  loss {record.train_loss:.4f}  val_loss {record.val_loss:.4f}  "
            f"{perplexity}val_accuracy {record.val_accuracy:.4f}{' (best)' if is_best else ''}  "
            f"{record.samples_per_s:,.0f} samples/s  {self._time_left(record.step)}"
        )

    def slow(self, exchanged: Exchanged) -> None:
        """Print which workers hold up the others, at most every few seconds."""
        if not exchanged.slow_ranks or time.monotonic() - self._warned < _INTERVAL_S:
            return
        self._warned = time.monotonic()
        for rank in exchanged.slow_ranks:
            others = min(exchanged.busy_s)
            self._print(
                f"warning: rank {rank} is slow: {exchanged.busy_s[rank]:.3f} s of its own work a step, "
                f"the fastest takes {others:.3f} s"
            )

    def stopped_early(self, epoch: int, metric: str, patience: int) -> None:
        """Print why the run ends before its last epoch."""
        self._print(f"stopped early after epoch {epoch}: {metric} has not improved for {patience} epochs")

    def _time_left(self, step: int) -> str:
        elapsed = time.monotonic() - self._started
        seconds = elapsed / max(step - self._first_step, 1) * (self._total_steps - step)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"

    def _print(self, line: str) -> None:
        self._printed = time.monotonic()
        print(line, flush=True)
