"""Checkpoints without Ray: every worker copies its part into the run's folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from upath import UPath

from app.config import TrainConfig
from app.training.records import EpochRecord, best_of


class LocalReporter:
    """Keeps the checkpoints of the best and of the last epoch."""

    def __init__(self, folder: UPath, config: TrainConfig) -> None:
        self.folder = folder
        self.records: list[EpochRecord] = []
        self._config = config

    def report(self, record: EpochRecord, checkpoint: Path) -> None:
        """Copy this worker's part; once all have, the first removes what is neither best nor last."""
        self.records.append(record)
        target = self.checkpoint_of(record)
        target.fs.put(f"{checkpoint}/", f"{target.path}/", recursive=True)
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            kept = {self.checkpoint_of(best_of(self.records, self._config)).name, target.name}
            for folder in [each for each in self.folder.iterdir() if each.name not in kept]:
                folder.fs.rm(folder.path, recursive=True)

    @contextmanager
    def latest_checkpoint(self) -> Iterator[Path | None]:
        """None: a run without Ray starts at the beginning."""
        yield None

    def checkpoint_of(self, record: EpochRecord) -> UPath:
        """The folder of an epoch's checkpoint."""
        return self.folder / f"checkpoint_{record.epoch:06d}"
