"""Reads this rank's micro-batches, ahead of time where the recipe says so."""

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from app.config import TrainConfig
from app.data.dataset import IGNORED, Dataset
from app.telemetry.phases import Phase
from app.training.activity import Activity
from app.training.data.micro_batch import MicroBatch


class _MicroBatches(TorchDataset[MicroBatch]):
    """The n-th micro-batch of a list."""

    def __init__(self, dataset: Dataset, indices: Sequence[list[int]]) -> None:
        self._dataset, self._indices = dataset, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: int) -> MicroBatch:
        # An empty batch has the shape of one sample that does not count: some ranks must compute along.
        indices = self._indices[number]
        batch = self._dataset.batch(indices or [0])
        inputs = {name: torch.from_numpy(array) for name, array in batch.inputs.items()}
        targets = torch.from_numpy(batch.targets)
        return MicroBatch(inputs, targets if indices else torch.full_like(targets, IGNORED))


class Loader:
    """Iterates over micro-batches on the worker's device."""

    def __init__(
        self,
        dataset: Dataset,
        indices: Sequence[list[int]],
        config: TrainConfig,
        device: torch.device,
        activity: Activity,
    ) -> None:
        self.last: MicroBatch | None = None
        self._config, self._device, self._activity = config, device, activity
        workers = min(config.loader.num_workers, len(indices))
        self._loader = DataLoader(
            _MicroBatches(dataset, indices),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=config.loader.prefetch_factor if workers else None,
            pin_memory=device.type == "cuda",
            # Of its own: drawing from torch's generator would make a resumed run another one.
            generator=torch.Generator().manual_seed(config.seed),
        )

    def __iter__(self) -> Iterator[MicroBatch]:
        batches = iter(self._loader)
        while True:
            with self._activity.phase(Phase.DATA):
                batch = next(batches, None)
            if batch is None:
                return
            self.last = batch.to(self._device, self._config)
            yield self.last
