"""The training loop of one worker; the same under Ray Train, under ``torchrun`` and alone."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch

from app.config import Layout, TrainConfig
from app.data.dataset import Dataset
from app.errors import NonFiniteLossError
from app.telemetry.alerts import Action
from app.telemetry.profiler import StepProfiler
from app.training.checkpoints.snapshot import take_snapshot
from app.training.checkpoints.state import Position
from app.training.checkpoints.writer import CheckpointWriter
from app.training.coordination.control import Control
from app.training.coordination.exchange import Exchange, LocalStep
from app.training.coordination.watchdog import Watchdog
from app.training.data.batches import Shard, micro_batches, train_batches, validation_batches
from app.training.data.loader import Loader
from app.training.data.micro_batch import MicroBatch
from app.training.early_stopping import should_stop
from app.training.engine import TrainingEngine
from app.training.engine.engine import gradient_norm, learning_rate, loss_scale
from app.training.engine.objective import Totals
from app.training.records import EpochRecord, best_of, perplexity
from app.training.reporting.meter import Meter
from app.training.reporting.observer import Observer
from app.training.worker import Worker


@dataclass
class Loop:
    """Epoch after epoch of training and validation, from a position on."""

    config: TrainConfig
    layout: Layout
    worker: Worker
    engine: TrainingEngine
    train_data: Dataset
    validation_data: Dataset
    is_language_model: bool
    total_steps: int
    writer: CheckpointWriter
    control: Control
    watchdog: Watchdog
    observer: Observer
    meter: Meter
    profiler: StepProfiler
    started: float
    """``time.monotonic`` at which this process began."""
    position: Position
    records: list[EpochRecord]
    first_step_s: float = 0.0
    _saved_step: int = -1
    _resumed_from_step: int = field(init=False)
    _exchange: Exchange = field(init=False)
    _shard: Shard = field(init=False)

    def __post_init__(self) -> None:
        self._resumed_from_step = self.position.step
        self._exchange = Exchange(self.worker)
        self._shard = Shard(self.layout.data_rank(self.worker.rank), self.layout.data)

    def run(self) -> Action:
        """Train to the end, or until it should stop; then what was asked of the run, with its state kept.

        Raises:
            NonFiniteLossError: a loss or gradient is not finite.
            TrainingError: a checkpoint cannot be written.
        """
        while not self._is_finished():
            if request := self._train_epoch():
                self._save()
                self.writer.wait()
                return request
            self._finish_epoch()
        self.writer.wait()
        return Action.CONTINUE

    def _is_finished(self) -> bool:
        if self.position.epoch > self.config.epochs or (self._steps_left() <= 0 and not self.position.batches_done):
            return True
        stopping = self.config.early_stopping
        stop = stopping and should_stop([float(getattr(each, stopping.metric)) for each in self.records], stopping)
        if stop and stopping:
            self.observer.stopped_early(self.records[-1].epoch, stopping)
        return bool(stop)

    def _steps_left(self) -> int:
        return self.total_steps - self.position.step

    def _train_epoch(self) -> Action:
        """The rest of the epoch's batches; what was asked of the run, which may end it early."""
        position, layout = self.position, self.layout
        batches = train_batches(
            self.train_data.lengths, self.config.global_batch_size, self.config.seed, position.epoch
        )
        numbers = [
            number
            for number in range(position.batches_done, len(batches))
            if (position.epoch, number) not in position.left_out
        ][: self._steps_left()]
        shares = (micro_batches(batches[number], self._shard, layout.micro_batch) for number in numbers)
        loader = Loader(self.train_data, [each for share in shares for each in share], self.config, self.worker.device)
        stream = iter(loader)
        self.observer.epoch_began(position)
        for number in numbers:
            self._step(number, loader, stream)
            is_last = number == numbers[-1]
            keeps = not is_last and self._keeps_state()
            asked = self._tell() if self._exchange.is_due or is_last or keeps else Action.CONTINUE
            if asked and not is_last:  # a whole epoch is validated first; what was asked for stays so
                return asked
            if keeps:
                self._save()
        return Action.CONTINUE

    def _step(self, number: int, loader: Loader, stream: Iterator[MicroBatch]) -> None:
        """One optimizer step on global batch ``number`` of the epoch."""
        began, waited_before, lr = time.monotonic(), loader.waited_s, learning_rate(self.engine)
        result = self.engine.train_step(islice(stream, self.layout.gradient_accumulation), self.watchdog.beat)
        data_s = loader.waited_s - waited_before
        norm = gradient_norm(self.engine)
        self.position.step += 1
        self.position.batches_done = number + 1
        self._check_finite(result.loss, norm, number)
        seconds = time.monotonic() - began
        self.first_step_s = self.first_step_s or time.monotonic() - self.started
        mfu = self.meter.utilisation(loader.last, seconds) if loader.last else None
        busy_s, scale = data_s + result.forward_s, loss_scale(self.engine)
        self._exchange.add(LocalStep(result.loss, lr, norm, scale, busy_s, data_s, seconds, mfu))
        self.profiler.step()

    def _check_finite(self, loss: torch.Tensor, norm: float, number: int) -> None:
        """The norm is global: all workers see at the same step that it is not finite, and say whose loss it was."""
        if self.config.precision == "fp16":
            return  # an overflow is how the loss scale finds its size
        if math.isfinite(norm) and self.engine.deepspeed.was_step_applied():
            return
        mine = torch.zeros(self.worker.size)
        mine[self.worker.rank] = float(not torch.isfinite(loss))
        ranks = [rank for rank, broken in enumerate(self.worker.sum(mine).tolist()) if broken]
        whose = f"the loss of rank {', '.join(map(str, ranks))}" if ranks else "the gradient, and no rank's loss,"
        raise NonFiniteLossError(
            f"step {self.position.step}: {whose} is not finite (epoch {self.position.epoch}, batch {number}). No "
            "checkpoint has it: lower train.optimizer.lr or clip gradients, and go on with train.resume=latest; "
            "train.non_finite=rollback leaves such a batch out"
        )

    def _keeps_state(self) -> bool:
        every = self.config.checkpoint.every_steps
        return bool(every) and self.position.step % (every or 1) == 0

    def _tell(self) -> Action:
        """Exchange the last steps with the other workers, and log them."""
        self.watchdog.beat(f"the exchange after step {self.position.step}")
        exchanged = self._exchange.run(max(self.control.asked(), self.observer.alerts.pending()))
        self.position.loss_sum += sum(exchanged.losses)
        self.position.losses += len(exchanged.losses)
        self.observer.exchanged(self.position, exchanged)
        return exchanged.request

    def _finish_epoch(self) -> None:
        """Validate, log the epoch and keep the state."""
        position = self.position
        totals = self._validate()
        record = EpochRecord(
            epoch=position.epoch,
            step=position.step,
            train_loss=position.loss_sum / max(position.losses, 1),
            val_loss=totals.mean_loss,
            val_accuracy=totals.accuracy,
            val_perplexity=perplexity(totals.mean_loss) if self.is_language_model else None,
            samples_per_s=self.observer.samples_per_s,
            first_step_s=self.first_step_s,
            resumed_from_step=self._resumed_from_step,
        )
        self.records.append(record)
        self.position = Position(step=position.step, epoch=position.epoch + 1, left_out=position.left_out)
        self._save()
        self.observer.epoch_ended(record, is_best=best_of(self.records, self.config) is record)

    def _validate(self) -> Totals:
        """Over the validation split, each sample counted once over all workers."""
        indices = list(validation_batches(self.validation_data.lengths, self._shard, 2 * self.layout.micro_batch))
        loader = Loader(self.validation_data, indices, self.config, self.worker.device)
        return Totals.of(self.worker.sum(self.engine.evaluate(self._watched(loader))))

    def _watched(self, loader: Loader) -> Iterator[MicroBatch]:
        for batch in loader:
            self.watchdog.beat(f"validation after step {self.position.step}")
            yield batch

    def _save(self) -> None:
        """Keep the state, unless this very state was kept."""
        if self._saved_step == self.position.step:
            return
        self.watchdog.beat(f"the checkpoint of step {self.position.step}")
        snapshot = take_snapshot(self.engine, self.layout, self.position, self.records, self.config.precision)
        self.writer.save(snapshot, best_of(self.records, self.config).step if self.records else None)
        self._saved_step = self.position.step
