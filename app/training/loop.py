"""The training loop of one worker; the same under Ray Train, under ``torchrun`` and alone."""

import shutil
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from upath import UPath

from app.config import Recipe, TrainConfig
from app.data.examples import Split
from app.data.prepared import PreparedData
from app.errors import TrainingError
from app.models.factory import build_model, logits_of
from app.training.batches import micro_batches, train_batches, validation_batches
from app.training.checkpoint import load_checkpoint, save_checkpoint
from app.training.early_stopping import should_stop
from app.training.engine import create_engine
from app.training.metrics_log import MetricsLog
from app.training.progress import Progress
from app.training.records import EpochRecord, StepRecord, best_of
from app.training.worker import Worker

_FLUSH_STEPS = 20  # steps whose losses are added up over the workers in one exchange


class Reporter(Protocol):
    """Where a worker's epochs go: Ray Train, or a folder."""

    def report(self, record: EpochRecord, checkpoint: Path) -> None:
        """Store an epoch with this worker's part of its checkpoint; every worker calls it."""
        ...

    def latest_checkpoint(self) -> AbstractContextManager[Path | None]:
        """The checkpoint that this run goes on from, if it was interrupted."""
        ...


def train(
    recipe: Recipe, data: PreparedData, worker: Worker, run_folder: UPath, reporter: Reporter
) -> list[EpochRecord]:
    """Train the recipe's model as one worker of the run, and return its epochs.

    Raises:
        RecipeError: the model cannot be built from the recipe.
        TrainingError: the split is smaller than a batch, or a checkpoint cannot be loaded.
    """
    started = time.monotonic()
    config = recipe.train
    torch.manual_seed(config.seed)  # the same weights everywhere
    model = build_model(recipe.model, len(data.labels), data.processor)
    total_steps = count_steps(config, len(data.train))
    engine = create_engine(model, config, total_steps)
    torch.manual_seed(config.seed + worker.shard.rank)  # other dropout in each shard
    with reporter.latest_checkpoint() as folder:
        records = load_checkpoint(engine, folder) if folder else []
    _Loop(config, data, worker, engine, total_steps, MetricsLog(run_folder), reporter, records, started).train()
    return records


def count_steps(config: TrainConfig, num_samples: int) -> int:
    """Optimizer steps of the whole run.

    Raises:
        TrainingError: there are fewer samples than one batch takes.
    """
    per_epoch = num_samples // config.global_batch_size
    if not per_epoch:
        raise TrainingError(
            f"train.global_batch_size is {config.global_batch_size}, the training split has {num_samples} samples: "
            "lower the batch size or give more data"
        )
    return min(config.epochs * per_epoch, config.max_steps or config.epochs * per_epoch)


@dataclass
class _Loop:
    config: TrainConfig
    data: PreparedData
    worker: Worker
    engine: Any
    total_steps: int
    log: MetricsLog
    reporter: Reporter
    records: list[EpochRecord]
    started: float
    first_step_s: float = 0.0
    step: int = 0
    resumed_from_step: int = 0
    progress: Progress = field(init=False)

    def __post_init__(self) -> None:
        if self.records:
            self.step = self.resumed_from_step = self.records[-1].step
            self.first_step_s = self.records[-1].first_step_s
        self.progress = Progress(self.config.epochs, self.total_steps, self.step)

    def train(self) -> None:
        """Train from the epoch after the last record to the end, or until it should stop."""
        for epoch in range(len(self.records) + 1, self.config.epochs + 1):
            if self.step >= self.total_steps or self._should_stop():
                return
            self._finish_epoch(self._train_epoch(epoch))

    def _train_epoch(self, epoch: int) -> EpochRecord:
        """Every batch of the epoch, then the validation split."""
        began, first = time.monotonic(), self.step
        self.engine.train()
        lengths = _lengths(self.data.train)
        batches = train_batches(lengths, self.config.global_batch_size, self.config.seed, epoch)
        pending: list[tuple[Tensor, float, float]] = []
        losses: list[float] = []
        for batch in batches[: self.total_steps - self.step]:
            pending.append(self._train_step(batch))
            if len(pending) == _FLUSH_STEPS:
                losses += self._flush(pending, epoch, began, first)
        losses += self._flush(pending, epoch, began, first)
        samples_per_s = (self.step - first) * self.config.global_batch_size / (time.monotonic() - began)
        val_loss, val_accuracy = self._validate()
        return EpochRecord(
            epoch=epoch,
            step=self.step,
            train_loss=sum(losses) / len(losses),
            val_loss=val_loss,
            val_accuracy=val_accuracy,
            samples_per_s=samples_per_s,
            first_step_s=self.first_step_s,
            resumed_from_step=self.resumed_from_step,
        )

    def _train_step(self, batch: list[int]) -> tuple[Tensor, float, float]:
        """One optimizer step: this worker's mean loss, the learning rate and the gradient's norm."""
        lr = self.engine.get_lr()[0]
        loss_sum = torch.zeros((), device=self.worker.device)
        for indices in micro_batches(batch, self.worker.shard, self.config.micro_batch):
            logits, classes = self._forward(self.data.train, indices)
            loss = functional.cross_entropy(logits, classes, label_smoothing=self.config.label_smoothing)
            self.engine.backward(loss)
            self.engine.step()
            loss_sum += loss.detach()
        self.step += 1
        if not self.first_step_s:
            self.first_step_s = time.monotonic() - self.started
        return loss_sum / self.config.gradient_accumulation, lr, float(self.engine.get_global_grad_norm() or 0.0)

    def _flush(self, pending: list[tuple[Tensor, float, float]], epoch: int, began: float, first: int) -> list[float]:
        """Average the losses of the last steps over the workers; log and show them."""
        if not pending:
            return []
        losses = self.worker.sum(torch.stack([loss for loss, _, _ in pending])) / self.worker.shard.world_size
        rate = (self.step - first) * self.config.global_batch_size / (time.monotonic() - began)
        steps = range(self.step - len(pending) + 1, self.step + 1)
        records = [
            StepRecord(step=step, epoch=epoch, loss=loss, lr=lr, grad_norm=norm, samples_per_s=rate)
            for step, loss, (_, lr, norm) in zip(steps, losses.tolist(), pending, strict=True)
        ]
        if self.worker.is_first:
            self.log.append(*records)
            self.progress.step(records[-1])
        pending.clear()
        return [record.loss for record in records]

    @torch.no_grad()
    def _validate(self) -> tuple[float, float]:
        """Mean loss and accuracy over the validation split, each sample counted once over all workers."""
        self.engine.eval()
        totals = torch.zeros(2, dtype=torch.float64)
        batches = validation_batches(_lengths(self.data.validation), self.worker.shard, 2 * self.config.micro_batch)
        for indices in batches:
            logits, classes = self._forward(self.data.validation, indices)
            totals[0] += functional.cross_entropy(logits, classes, reduction="sum").item()
            totals[1] += (logits.argmax(-1) == classes).sum().item()
        loss, accuracy = (self.worker.sum(totals) / len(self.data.validation)).tolist()
        return loss, accuracy

    def _forward(self, split: Split, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Logits (float32) and classes of a few samples."""
        tensors = self.data.processor.encode([split.inputs[index] for index in indices])
        dtype = torch.bfloat16 if self.config.precision == "bf16" else torch.float32
        inputs = {name: torch.from_numpy(array).to(self.worker.device) for name, array in tensors.items()}
        inputs = {name: each.to(dtype) if each.is_floating_point() else each for name, each in inputs.items()}
        classes = torch.tensor([split.classes[index] for index in indices], device=self.worker.device)
        return logits_of(self.engine(**inputs)).float(), classes

    def _finish_epoch(self, record: EpochRecord) -> None:
        """Log the epoch, show it and store its checkpoint."""
        self.records.append(record)
        if self.worker.is_first:
            self.log.append(record)
            self.progress.epoch(record, is_best=best_of(self.records, self.config) is record)
        checkpoint = save_checkpoint(self.engine, self.records, self.worker.is_first)
        try:
            self.reporter.report(record, checkpoint)
        finally:
            shutil.rmtree(checkpoint, ignore_errors=True)

    def _should_stop(self) -> bool:
        stopping = self.config.early_stopping
        if stopping is None:
            return False
        values = [float(getattr(record, stopping.metric)) for record in self.records]
        stop = should_stop(values, stopping)
        if stop and self.worker.is_first:
            self.progress.stopped_early(self.records[-1].epoch, stopping.metric, stopping.patience)
        return stop


def _lengths(split: Split) -> list[int]:
    """A sort key by which samples pad alike: the characters of a text; pictures are all of one size."""
    return [len(given) if isinstance(given, str) else 0 for given in split.inputs]
