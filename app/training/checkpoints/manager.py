"""The checkpoints of a run, as its training loop saves and restores them."""

from collections.abc import Callable

from upath import UPath

from app.best_effort import warn
from app.config import Layout, TrainConfig
from app.config.metrics import Selection
from app.storage import no_op
from app.training.activity import Activity
from app.training.checkpoints.fragments import fragments_of
from app.training.checkpoints.reader import load_checkpoint
from app.training.checkpoints.snapshot import Snapshot, take_snapshot
from app.training.checkpoints.state import Position, TrainState
from app.training.checkpoints.store import Checkpoint, CheckpointStore
from app.training.checkpoints.writer import CheckpointWriter
from app.training.engine import TrainingEngine
from app.training.records import EpochRecord, ranked
from app.training.worker import Worker, on_first


class CheckpointManager:
    """Saves and restores the state of an engine. Every process has one, and calls it in the same order."""

    def __init__(
        self,
        folder: UPath,
        engine: TrainingEngine,
        config: TrainConfig,
        selection: Selection,
        layout: Layout,
        worker: Worker,
        activity: Activity,
        before_commit: Callable[[], None] = no_op,
    ) -> None:
        """Raises TrainingError if the state of ``engine`` cannot be saved, before there is work to lose.

        ``before_commit`` is passed to ``CheckpointWriter``.
        """
        # This is called for its errors only.
        fragments_of(engine, layout)
        self._engine, self._config, self._selection, self._layout = engine, config, selection, layout
        self._worker, self._activity = worker, activity
        self._store = CheckpointStore(folder, activity.report_progress, warn if worker.is_first else no_op)
        self.writer = CheckpointWriter(self._store, config.checkpoint, activity.report_progress, before_commit)
        self._saved: tuple[int, int] | None = None
        """Step and epoch of the last save. The last step of an epoch is also where the next epoch begins."""

    def restore(self) -> TrainState | None:
        """Restore the newest intact checkpoint, and clean up after interrupted and damaged ones. None without one.

        Raises:
            StorageError: every checkpoint is damaged.
            TrainingError: the checkpoint is of another model.
        """
        self._activity.begin("looking for a checkpoint")
        self._saved = None
        # One process lists them, so that all try the same checkpoints in the same order.
        committed = on_first(self._store.committed)
        restored = self._store.newest_readable(committed, self._load)
        if restored:
            self.writer.reuse_frozen(self._store.folder_of(restored[0]))
        # Only now, because reading has shown which newer checkpoints are damaged.
        if self._worker.is_first:
            self._store.sweep(after=restored[0] if restored else None)
        return restored[1] if restored else None

    def has_any(self) -> bool:
        """Return whether there is a committed checkpoint. Collective."""
        return bool(on_first(self._store.committed))

    def is_due(self, step: int) -> bool:
        """Return whether the recipe asks for a checkpoint after optimizer step ``step``."""
        interval = self._config.checkpoint.every_steps
        return interval is not None and step % interval == 0

    def save(self, position: Position, records: list[EpochRecord], again: bool = False) -> None:
        """Save the state, unless it was saved already. ``again`` saves it anyway, after a save that failed.

        Raises:
            TrainingError: the state cannot be written.
        """
        if self._saved == (position.step, position.epoch) and not again:
            return
        self._activity.begin(f"the checkpoint of step {position.step}")

        def take() -> Snapshot:
            frozen = self.writer.takes_frozen
            return take_snapshot(self._engine, self._layout, position, records, self._config.precision, frozen)

        self.writer.save(take, [record.step for record in ranked(records, self._selection)])
        self._saved = position.step, position.epoch

    def _load(self, checkpoint: Checkpoint) -> tuple[Checkpoint, TrainState]:
        self._activity.begin(f"reading the checkpoint of step {checkpoint.step}")
        folder = self._store.folder_of(checkpoint)
        return checkpoint, load_checkpoint(self._engine, self._layout, folder, self._activity.report_progress)
