"""What one worker reads of the data."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.config import Layout, TrainConfig
from app.data.prepared import PreparedData
from app.training.activity import Activity
from app.training.data.batches import Shard, micro_batches, train_batches, validation_batches
from app.training.data.loader import Loader
from app.training.worker import Worker


@dataclass(frozen=True)
class Feed:
    """Reads this worker's share of each split, in micro-batches on its device."""

    data: PreparedData
    config: TrainConfig
    layout: Layout
    worker: Worker
    activity: Activity

    @property
    def batches_per_epoch(self) -> int:
        """Global batches of an epoch; samples that do not fill a last one are left out."""
        return len(self.data.train) // self.config.global_batch_size

    def train(self, epoch: int, numbers: Sequence[int]) -> Loader:
        """The global batches ``numbers`` of ``epoch``, one after the other."""
        batches = train_batches(self.data.train.lengths, self.config.global_batch_size, self.config.seed, epoch)
        shares = (micro_batches(batches[number], self._shard, self.layout.micro_batch) for number in numbers)
        indices = [each for share in shares for each in share]
        return Loader(self.data.train, indices, self.config, self.worker.device, self.activity)

    def validation(self) -> Loader:
        """The validation split, each sample once over all workers."""
        indices = list(validation_batches(self.data.validation.lengths, self._shard, 2 * self.layout.micro_batch))
        return Loader(self.data.validation, indices, self.config, self.worker.device, self.activity)

    @property
    def _shard(self) -> Shard:
        return Shard(self.layout.data_rank(self.worker.rank), self.layout.data)
