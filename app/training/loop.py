"""The training loop of one worker; the same under Ray Train, under ``torchrun`` and alone."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NoReturn

import torch

from app.config import TrainConfig
from app.errors import NonFiniteLossError
from app.telemetry.alerts import Action
from app.telemetry.phases import Phase
from app.telemetry.profiler import StepProfiler
from app.training.activity import Activity
from app.training.checkpoints.manager import CheckpointManager
from app.training.checkpoints.state import Position
from app.training.coordination.exchange import Exchange, LocalStep
from app.training.data.feed import Feed
from app.training.data.micro_batch import MicroBatch
from app.training.early_stopping import should_stop
from app.training.engine import TrainingEngine
from app.training.engine.buffers import average_buffers
from app.training.engine.objective import Totals
from app.training.records import EpochRecord
from app.training.reporting.meter import Meter
from app.training.reporting.recorder import Recorder
from app.training.worker import Worker
from app.warnings import warn


@dataclass
class Loop:
    """Epoch after epoch of training and validation, from where the run stood."""

    config: TrainConfig
    total_steps: int
    worker: Worker
    engine: TrainingEngine
    feed: Feed
    checkpoints: CheckpointManager
    exchange: Exchange
    recorder: Recorder
    meter: Meter
    profiler: StepProfiler
    activity: Activity
    position: Position = field(default_factory=Position)
    records: list[EpochRecord] = field(default_factory=list)

    def restore(self, left_out: Iterable[tuple[int, int]] = ()) -> None:
        """Go to the newest intact checkpoint, or to the start; leave out these batches from then on.

        Raises:
            StorageError: every checkpoint is damaged.
            TrainingError: the checkpoint is of another model.
        """
        state = self.checkpoints.restore()
        if state:
            self.worker.print(f"going on from step {state.position.step:,} of {self.total_steps:,}")
            if state.is_in_another_order and self.worker.is_first:
                warn(
                    f"the checkpoint of step {state.position.step:,} is from a version of Rayloom that shuffled epochs "
                    f"differently: the rest of epoch {state.position.epoch} repeats some samples and skips others, and "
                    "batches that a rollback left out contain other samples; later epochs repeat no samples"
                )
        self.position, self.records = (state.position, state.records) if state else (Position(), [])
        self.position.left_out = sorted({*self.position.left_out, *left_out})
        self.exchange.forget()
        self.recorder.begin(self.position, self.records)

    def run(self) -> Action:
        """Train to the end, or until it should stop; then what was asked of the run, with its state kept.

        Raises:
            NonFiniteLossError: a loss or gradient is not finite.
            TrainingError: a checkpoint cannot be written.
        """
        while not self._is_finished():
            if request := self._train_epoch():
                self.checkpoints.save(self.position, self.records)
                self.checkpoints.wait()
                return request
            self._finish_epoch()
        self.checkpoints.wait()
        return Action.CONTINUE

    def _is_finished(self) -> bool:
        if self.position.epoch > self.config.epochs or (self._steps_left() <= 0 and not self.position.batches_done):
            return True
        stopping = self.config.early_stopping
        if not stopping:
            return False
        values = [float(getattr(record, stopping.metric)) for record in self.records]
        if not should_stop(values, stopping):
            return False
        self.worker.print(
            f"stopped early after epoch {self.records[-1].epoch}: {stopping.metric} has not improved for "
            f"{stopping.patience} epochs"
        )
        return True

    def _steps_left(self) -> int:
        return self.total_steps - self.position.step

    def _train_epoch(self) -> Action:
        """The rest of the epoch's batches; what was asked of the run, which may end it early."""
        position = self.position
        numbers = [
            number
            for number in range(position.batches_done, self.feed.batches_per_epoch)
            if (position.epoch, number) not in position.left_out
        ][: self._steps_left()]
        stream = self.feed.train(position.epoch, numbers)
        self.recorder.begin_epoch()
        for number in numbers:
            self._step(number, stream)
            is_last = number == numbers[-1]
            keeps = not is_last and self.checkpoints.is_due(position.step)
            asked = self._tell() if self.exchange.is_due or is_last or keeps else Action.CONTINUE
            if asked:
                return asked
            if keeps:
                self.checkpoints.save(position, self.records)
        return Action.CONTINUE

    def _step(self, number: int, stream: Iterator[MicroBatch]) -> None:
        """One optimizer step on global batch ``number`` of the epoch."""
        began, seconds_in = time.monotonic(), self.activity.start_clock()
        accumulation = self.feed.layout.gradient_accumulation
        result = self.engine.train_step(islice(stream, accumulation), self.activity)
        self.position.step += 1
        self.position.batches_done = number + 1
        seconds, last = time.monotonic() - began, self.feed.loader.last
        self.recorder.end_step()
        self.exchange.add(
            LocalStep(
                number,
                result,
                busy_s=seconds_in[Phase.DATA] + seconds_in[Phase.FORWARD],
                data_s=seconds_in[Phase.DATA],
                seconds=seconds,
                mfu=self.meter.utilisation(last, seconds) if last else None,
            )
        )
        self.profiler.step()

    def _tell(self) -> Action:
        """Exchange the last steps with the other workers and record them, up to and including a broken one.

        If a checkpoint could not be written, save the current state.
        """
        self.activity.begin(f"the exchange after step {self.position.step}")
        exchanged = self.exchange.run()
        self.position.loss_sum += sum(exchanged.applied_losses)
        self.position.losses += len(exchanged.applied_losses)
        self.recorder.record_steps(self.position, exchanged)
        if exchanged.broken is not None:
            self._break(exchanged.steps, exchanged.broken)
        if exchanged.has_lost_state:
            self.checkpoints.save(self.position, self.records, again=True)
        return exchanged.request

    def _break(self, steps: Sequence[LocalStep], broken: int) -> NoReturn:
        """Go back to the end of a step that is not finite, and say whose loss it was."""
        self.position.step -= len(steps) - 1 - broken
        self.position.batches_done = steps[broken].batch + 1
        mine = torch.zeros(self.worker.size)
        mine[self.worker.rank] = float(not torch.isfinite(steps[broken].result.loss))
        ranks = [rank for rank, is_broken in enumerate(self.worker.all_reduce(mine).tolist()) if is_broken]
        whose = f"the loss of rank {', '.join(map(str, ranks))}" if ranks else "the gradient, and no rank's loss,"
        raise NonFiniteLossError(
            f"step {self.position.step}: {whose} is not finite (epoch {self.position.epoch}, batch "
            f"{steps[broken].batch}). No checkpoint has it: lower train.optimizer.lr or clip gradients, and go on with "
            "train.resume=latest; train.non_finite=rollback leaves such a batch out"
        )

    def _finish_epoch(self) -> None:
        """Validate, record the epoch and keep the state."""
        position = self.position
        record = self.recorder.make_epoch(position, self._validate())
        self.records.append(record)
        self.position = Position(step=position.step, epoch=position.epoch + 1, left_out=position.left_out)
        self.checkpoints.save(self.position, self.records)
        self.recorder.record_epoch(record)

    def _validate(self) -> Totals:
        """Validate, after averaging the buffers of all workers. Each sample counts once over all workers."""
        average_buffers(self.engine)
        return Totals.of(self.worker.all_reduce(self.engine.evaluate(self._validation())))

    def _validation(self) -> Iterator[MicroBatch]:
        for batch in self.feed.validation():
            self.activity.begin(f"validation after step {self.position.step}")
            yield batch
