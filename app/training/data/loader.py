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
    """One micro-batch to read."""

    split: Split
    indices: list[int]
    entropy: tuple[int, ...]
    """Seed sequence of the loader process while it reads this micro-batch: seed, epoch, rank, number."""


class _Reader(TorchDataset[MicroBatch]):
    """Reads the micro-batches of requests, in a process of the loader or in the training process."""

    def __init__(self, splits: Mapping[Split, Dataset]) -> None:
        self._splits = splits

    def __getitem__(self, request: Request) -> MicroBatch:
        if get_worker_info() is not None:  # the training process has its own random state, which checkpoints save
            seed_random(int(np.random.SeedSequence(request.entropy).generate_state(1, np.uint64)[0]))
        # An empty batch has the shape of one sample that does not count: some ranks must compute along.
        batch = self._splits[request.split].batch(request.indices or [0])
        inputs = {name: torch.from_numpy(array) for name, array in batch.inputs.items()}
        targets = torch.from_numpy(batch.targets)
        return MicroBatch(inputs, targets if request.indices else torch.full_like(targets, IGNORED))


class _Requests(Sampler[Request]):
    """The requests that the loader reads next."""

    def __init__(self) -> None:
        self.next: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.next)


class Loader:
    """Reads micro-batches onto the worker's device.

    Its processes live as long as the run, so each gets the dataset only once, whatever the start method.
    """

    def __init__(self, data: PreparedData, config: TrainConfig, device: torch.device, activity: Activity) -> None:
        self.last: MicroBatch | None = None
        """The micro-batch that was read last."""
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
        """Yield a micro-batch for each request. Unread micro-batches of earlier requests are dropped."""
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
        """End the processes. torch ends them when the last reference is dropped."""
        self._loader, self._batches = None, iter(())
