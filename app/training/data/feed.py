"""What one worker reads of the data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from app.config import Layout, TrainConfig
from app.data.prepared import PreparedData
from app.training.activity import Activity
from app.training.data.batches import Indices, Shard, micro_batches, train_batches, validation_batches
from app.training.data.loader import Loader, Request, Split
from app.training.data.micro_batch import MicroBatch
from app.training.worker import Worker

_VALIDATION_EPOCH = 0
"""Validation draws the same random numbers in every epoch. Training epochs begin at 1."""


@dataclass
class Feed:
    """Reads this worker's share of each split, in micro-batches on its device."""

    data: PreparedData
    config: TrainConfig
    layout: Layout
    worker: Worker
    activity: Activity
    loader: Loader = field(init=False)

    def __post_init__(self) -> None:
        self.loader = Loader(self.data, self.config, self.worker.device, self.activity)

    @property
    def batches_per_epoch(self) -> int:
        """Global batches of an epoch; samples that do not fill a last one are left out."""
        return len(self.data.train) // self.config.global_batch_size

    def train(self, epoch: int, numbers: Sequence[int]) -> Iterator[MicroBatch]:
        """The global batches ``numbers`` of ``epoch``, one after the other."""
        batches = train_batches(self.data.train.lengths, self.config.global_batch_size, self.config.seed, epoch)
        accumulation = self.layout.gradient_accumulation
        return self.loader.read(
            self._request("train", epoch, number * accumulation + place, indices)
            for number in numbers
            for place, indices in enumerate(micro_batches(batches[number], self._shard, accumulation))
        )

    def validation(self) -> Iterator[MicroBatch]:
        """The validation split, each sample once over all workers."""
        batches = validation_batches(self.data.validation.lengths, self._shard, 2 * self.layout.micro_batch)
        return self.loader.read(
            self._request("validation", _VALIDATION_EPOCH, number, indices) for number, indices in enumerate(batches)
        )

    def close(self) -> None:
        """End the loader's processes."""
        self.loader.close()

    def _request(self, split: Split, epoch: int, number: int, indices: Indices) -> Request:
        """Return the request for micro-batch ``number`` of the epoch. Its seed is the same in a resumed run."""
        return Request(split, indices.tolist(), (self.config.seed % 2**64, epoch, self._shard.rank, number))

    @property
    def _shard(self) -> Shard:
        return Shard(self.layout.data_rank(self.worker.rank), self.layout.data)
