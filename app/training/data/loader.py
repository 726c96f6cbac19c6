"""Reads this rank's micro-batches, ahead of time where the recipe says so."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from app.config import TrainConfig
from app.data.dataset import IGNORED, Dataset
from app.data.prepared import PreparedData
from app.telemetry.phases import Phase
from app.training.activity import Activity
from app.training.data.micro_batch import MicroBatch
from app.training.worker import seed_random

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class Request:
    """One micro-batch to be read."""

    split: Split
    indices: list[int]
    entropy: tuple[int, ...]
    """What the random numbers of a loader process are drawn from while it reads this: seed, epoch, rank, number."""


class _Reader(TorchDataset[MicroBatch]):
    """Answers requests, in a process of the loader or in the training process."""

    def __init__(self, splits: Mapping[Split, Dataset]) -> None:
        self._splits = splits

    def __getitem__(self, request: Request) -> MicroBatch:
        if get_worker_info() is not None:  # the training process has a sequence of its own, which checkpoints keep
            seed_random(int(np.random.SeedSequence(request.entropy).generate_state(1, np.uint64)[0]))
        # An empty batch has the shape of one sample that does not count: some ranks must compute along.
        batch = self._splits[request.split].batch(request.indices or [0])
        inputs = {name: torch.from_numpy(array) for name, array in batch.inputs.items()}
        targets = torch.from_numpy(batch.targets)
        return MicroBatch(inputs, targets if request.indices else torch.full_like(targets, IGNORED))


class _Requests(Sampler[Request]):
    """What the loader reads next."""

    def __init__(self) -> None:
        self.next: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.next)


class Loader:
    """Reads micro-batches onto the worker's device.

    Its processes live as long as the run: each gets the dataset once, whatever the way in which processes start.
    """

    def __init__(self, data: PreparedData, config: TrainConfig, device: torch.device, activity: Activity) -> None:
        self.last: MicroBatch | None = None
        """The one that was read last."""
        self._config, self._device, self._activity = config, device, activity
        self._requests = _Requests()
        self._batches: Iterator[MicroBatch] = iter(())
        workers = config.loader.num_workers
        self._loader: DataLoader[MicroBatch] | None = DataLoader(
            _Reader({"train": data.train, "validation": data.validation}),
            batch_size=None,
            sampler=self._requests,
            num_workers=workers,
            persistent_workers=workers > 0,
            prefetch_factor=config.loader.prefetch_factor if workers else None,
            pin_memory=device.type == "cuda",
            # Of its own: drawing from torch's generator would make a resumed run another one.
            generator=torch.Generator().manual_seed(config.seed),
        )

    def read(self, requests: Iterable[Request]) -> Iterator[MicroBatch]:
        """A micro-batch for each request; what earlier requests have left unread is dropped."""
        assert self._loader is not None
        self._requests.next = requests
        self._batches = iter(self._loader)
        while True:
            with self._activity.phase(Phase.DATA):
                batch = next(self._batches, None)
            if batch is None:
                return
            self.last = batch.to(self._device, self._config)
            yield self.last

    def close(self) -> None:
        """End the processes: torch does so once nothing refers to them."""
        self._loader, self._batches = None, iter(())
