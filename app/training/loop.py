"""The training loop of one worker. It is the same under Ray Train, under ``torchrun`` and alone."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NoReturn

import torch

from app.best_effort import warn
from app.config import EarlyStoppingConfig, TrainConfig
from app.config.metrics import Selection
from app.data.prepared import Indices
from app.errors import NonFiniteLossError
from app.tasks.objective import Totals
from app.telemetry.events import EventLog
from app.telemetry.profiler import StepProfiler
from app.telemetry.step_time import Phase
from app.training.activity import Activity
from app.training.checkpoints.manager import CheckpointManager
from app.training.checkpoints.state import Position
from app.training.coordination.sync import LocalStep, StepSync
from app.training.data.feed import Feed, MicroBatch
from app.training.engine import TrainingEngine
from app.training.engine.engine import average_buffers, sums_to_add
from app.training.records import EpochRecord, should_stop
from app.training.reporting.meter import Meter
from app.training.reporting.recorder import Recorder
from app.training.stop_request import StopRequest
from app.training.worker import Worker, gather, seed_step

if TYPE_CHECKING:  # most runs have one source, which is no stream
    from app.training.data.micro_epochs import MicroEpochs


@dataclass
class Loop:
    """Training and validation, epoch after epoch, from the run's current position."""

    config: TrainConfig
    selection: Selection
    total_steps: int
    worker: Worker
    engine: TrainingEngine
    feed: Feed
    checkpoints: CheckpointManager
    sync: StepSync
    recorder: Recorder
    meter: Meter
    profiler: StepProfiler
    activity: Activity
    events: EventLog
    stream: "MicroEpochs | None" = None
    """Gives each epoch its samples. None: all epochs have the same."""
    position: Position = field(default_factory=Position)
    records: list[EpochRecord] = field(default_factory=list)

    def restore(self, left_out: Iterable[tuple[int, int]] = ()) -> None:
        """Go to the newest intact checkpoint, or to the start. Leave out these batches, given as (epoch, number).

        Raises:
            StorageError: every checkpoint is damaged.
            TrainingError: the checkpoint is of another model.
        """
        self.activity.take_totals()  # the steps that they count are trained again
        state = self.checkpoints.restore()
        if state:
            self.worker.print(f"going on from step {state.position.step:,} of {self.total_steps:,}")
            if state.is_in_another_order(self.feed.order.name) and self.worker.is_first:
                warn(
                    f"the checkpoint of step {state.position.step:,} is from a version of Rayloom that shuffled epochs "
                    f"differently: the rest of epoch {state.position.epoch} repeats some samples and skips others, and "
                    "batches that a rollback left out contain other samples; later epochs repeat no samples"
                )
        self.position, self.records = (state.position, state.records) if state else (Position(), [])
        self.position.left_out = sorted({*self.position.left_out, *left_out})
        self.sync.forget()
        self.recorder.open(self.position, self.records)

    def run(self) -> StopRequest:
        """Train to the end or until a stop request, and save the state. Return the request, or NONE.

        Raises:
            NonFiniteLossError: a loss or gradient is not finite.
            TrainingError: a checkpoint cannot be written.
        """
        while not self._is_finished():
            request = self._await_samples(self.stream) if self.stream else StopRequest.NONE
            if self.stream and self.stream.has_ended:
                break
            if request := request or self._train_epoch():
                self.checkpoints.save(self.position, self.records)
                self.checkpoints.writer.wait()
                return request
            self._finish_epoch()
        self.checkpoints.writer.wait()
        return StopRequest.NONE

    def _await_samples(self, stream: "MicroEpochs") -> StopRequest:
        """Wait for the epoch's micro-epoch, or the end of the stream. Return the request that ended the wait, or NONE.

        Raises:
            DataError: the stream cannot be read.
        """
        position = self.position
        with self.activity.timed("data"):
            while not stream.enter(position.epoch, position.offsets):
                self.activity.begin("waiting for messages")
                synced = self.sync.run()
                if synced.has_lost_state:
                    self.checkpoints.save(position, self.records, again=True)
                if synced.stop_request or stream.has_ended:
                    return synced.stop_request
        position.offsets = stream.start
        return StopRequest.NONE

    def _is_finished(self) -> bool:
        stopping = self.config.early_stopping
        if stopping and self._stops_early(stopping):
            self.worker.print(
                f"stopped early after epoch {self.records[-1].epoch}: {self.selection.metric} has not improved for "
                f"{stopping.patience} epochs"
            )
            return True
        return self._has_trained_all()

    def _stops_early(self, stopping: EarlyStoppingConfig) -> bool:
        return not self._has_trained_all() and should_stop(self.records, self.selection, stopping)

    def _has_trained_all(self) -> bool:
        # An epoch that ``max_steps`` has cut short still has to be validated.
        return self.position.epoch > self.config.epochs or (self._steps_left() <= 0 and not self.position.batches_done)

    def _steps_left(self) -> int:
        return self.total_steps - self.position.step

    def _train_epoch(self) -> StopRequest:
        """Train on the rest of the epoch's batches. Return the request that ended it early, or NONE."""
        position = self.position
        numbers = [
            number
            for number in range(position.batches_done, self.feed.order.num_batches(position.epoch))
            if (position.epoch, number) not in position.left_out
        ][: max(0, self._steps_left())]
        stream = self.feed.train(position.epoch, numbers)
        self.recorder.begin_epoch()
        for number in numbers:
            self._step(number, stream)
            is_last = number == numbers[-1]
            # After the last batch ``_finish_epoch`` saves the state, with the epoch's record.
            saves = not is_last and self.checkpoints.is_due(position.step)
            # Sync before a checkpoint: a step that is not finite must not be saved.
            request = self._sync() if self.sync.is_due or is_last or saves else StopRequest.NONE
            if request:
                return request
            if saves:
                with self.activity.timed("checkpoint"):
                    self.checkpoints.save(position, self.records)
        return StopRequest.NONE

    def _step(self, number: int, stream: Iterator[MicroBatch]) -> None:
        """Do one optimizer step on global batch ``number`` of the epoch."""
        began, seconds_in = time.monotonic(), self.activity.start_clock()
        accumulation = self.feed.layout.gradient_accumulation
        samples = self.feed.order.batch_size(self.position.epoch, number)
        seed_step(self.config.seed, self.feed.layout.data_rank(self.worker.rank), self.position.step)
        result = self.engine.train_step(islice(stream, accumulation), self.activity)

        self.position.step += 1
        # Not a count of steps: batches that were left out are passed, too.
        self.position.batches_done = number + 1
        seconds, last = time.monotonic() - began, self.feed.loader.last
        self.activity.end_step(seconds)
        self.recorder.end_step()
        self.sync.add(
            LocalStep(
                number,
                result,
                busy_s=seconds_in[Phase.DATA] + seconds_in[Phase.FORWARD],
                data_s=seconds_in[Phase.DATA],
                seconds=seconds,
                mfu=self.meter.utilisation(last, samples, seconds) if last else None,
                samples=samples,
                reading=self.feed.loader.take_reading(),
            )
        )
        self.profiler.step()

    def _sync(self) -> StopRequest:
        """Exchange the last steps with the other workers and record them, up to and including a broken one.

        If a checkpoint could not be written, save the current state.
        """
        self.activity.begin(f"the sync after step {self.position.step}")
        with self.activity.timed("sync"):
            synced = self.sync.run()
        self.position.loss_sum += sum(synced.applied_losses)
        self.position.losses += len(synced.applied_losses)
        self.recorder.record_steps(self.position, synced)
        if synced.broken is not None:
            self._raise_non_finite(synced.steps, synced.broken)
        if synced.has_lost_state:
            self.checkpoints.save(self.position, self.records, again=True)
        return synced.stop_request

    def _raise_non_finite(self, steps: Sequence[LocalStep], broken: int) -> NoReturn:
        """Set the position to the end of the broken step, and raise NonFiniteLossError with the ranks at fault."""
        self.position.step -= len(steps) - 1 - broken
        self.position.batches_done = steps[broken].batch + 1
        is_broken = torch.zeros(self.worker.size)
        is_broken[self.worker.rank] = float(not torch.isfinite(steps[broken].result.loss))
        ranks = self.worker.all_reduce(is_broken).nonzero().flatten().tolist()
        culprit = f"the loss of rank {', '.join(map(str, ranks))}" if ranks else "the gradient, and no rank's loss,"
        raise NonFiniteLossError(
            f"step {self.position.step}: {culprit} is not finite (epoch {self.position.epoch}, batch "
            f"{steps[broken].batch}). No checkpoint has it: lower train.optimizer.lr or clip gradients, and go on with "
            "train.resume=latest; train.non_finite=rollback leaves such a batch out"
        )

    def _finish_epoch(self) -> None:
        """Validate, save the state and record the epoch."""
        position = self.position
        with self.activity.timed("validation"):
            validation = self._validate()
        record = self.recorder.make_epoch(position, validation, self.activity.take_totals())
        trained = [n for n in range(position.batches_done) if (position.epoch, n) not in position.left_out]
        if seen := self.feed.order.source_samples(position.epoch, trained):
            record = record.model_copy(update={"source_samples": seen})
        self.records.append(record)
        self.position = Position(step=position.step, epoch=position.epoch + 1, left_out=position.left_out)
        if self.stream:
            self.position.offsets = self.stream.stop
        stopping = self.config.early_stopping
        record.stopped_early = stopping is not None and self._stops_early(stopping)
        # This counts with the next epoch, because this one's record is in the checkpoint.
        with self.activity.timed("checkpoint"):
            self.checkpoints.save(self.position, self.records)
        self.recorder.record_epoch(record)

    def _validate(self) -> dict[str, float]:
        """Return ``val_loss`` and the metrics, after averaging the buffers of all workers. Each sample counts once."""
        average_buffers(self.engine)
        if (mixture := self.feed.order.mixture) is None:
            return self.engine.objective.values(*self._validation_totals())
        rows_of = mixture.validation_rows()
        # Each row has one source, so these totals add up to those of the whole split.
        parts = {name: self._validation_totals(rows) for name, rows in rows_of.items() if len(rows)}
        losses = {name: self.engine.objective.values(part.sums)["val_loss"] for name, part in parts.items()}
        of_sources = {f"val_loss_{name}": loss for name, loss in losses.items()}
        sums = torch.stack([part.sums for part in parts.values()]).sum(0)
        batches = [batch for part in parts.values() for batch in part.rows]
        return self.engine.objective.values(sums, batches) | of_sources

    def _validation_totals(self, rows: Indices | None = None) -> Totals:
        """Return the totals over all workers of the validation split, or of these rows."""
        layout, rank = self.feed.layout, self.worker.rank
        own = self.engine.evaluate(self._validation_batches(rows))
        sums = self.worker.all_reduce(sums_to_add(own.sums, layout, rank))
        if not self.engine.objective.row_metrics:
            return Totals(sums, [])
        # Tensor-parallel ranks have the same rows.
        kept = own.rows if layout.tensor_rank(rank) == 0 else []
        return Totals(sums, [batch for part in gather(kept) for batch in part])

    def _validation_batches(self, rows: Indices | None) -> Iterator[MicroBatch]:
        for batch in self.feed.validation(rows):
            self.activity.begin(f"validation after step {self.position.step}")
            yield batch
