"""One worker's share of the data: micro-batches on its device, read ahead of time if the recipe says so."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from app.config import Layout, TrainConfig
from app.data.augmentation import Augmentation
from app.data.images import allocate_with
from app.data.labelled import LabelledDataset
from app.data.prepared import IGNORED, Batch, Dataset, Indices, PreparedData
from app.models.precision import TORCH_DTYPES
from app.telemetry.record import NO_TIME, Medium, ReadAhead, ReadingRecord, ReadTime
from app.telemetry.step_time import Phase
from app.training.activity import Activity
from app.training.data.lending import Lender
from app.training.data.order import SampleOrder
from app.training.data.ranks import DataRank, validation_share
from app.training.data.reading import ReadingControl
from app.training.worker import Worker, seed_random

Split = Literal["train", "validation"]
_VALIDATION_EPOCH = 0
"""Validation draws the same random numbers in every epoch. Training epochs begin at 1."""


@dataclass(frozen=True)
class MicroBatch:
    """The model's inputs by name, targets of shape (batch, …), and a teacher's logits, if there is one."""

    inputs: dict[str, Tensor]
    targets: Tensor
    taught: Tensor | None = None
    weight: float | None = None
    """Weight of its mean loss in the step. None: its share of the samples."""
    read: ReadTime = NO_TIME
    """The time that reading it took, in the process that read it."""

    def to(self, device: torch.device, config: TrainConfig) -> "MicroBatch":
        """Return it on ``device``, with floating-point inputs in the precision of training."""
        dtype = TORCH_DTYPES[config.precision]
        inputs = {
            name: tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)
            for name, tensor in self.inputs.items()
        }
        taught = None if self.taught is None else self.taught.to(device, non_blocking=True)
        targets = self.targets.to(device, non_blocking=True)
        return replace(self, inputs=inputs, targets=targets, taught=taught)

    def pin_memory(self) -> "MicroBatch":
        """Return it in page-locked memory, from which a GPU copies while it computes. torch's loader calls this."""
        inputs = {name: tensor.pin_memory() for name, tensor in self.inputs.items()}
        taught = None if self.taught is None else self.taught.pin_memory()
        return replace(self, inputs=inputs, targets=self.targets.pin_memory(), taught=taught)


@dataclass(frozen=True)
class BatchRequest:
    """One micro-batch to read."""

    split: Split
    indices: list[int]
    entropy: tuple[int, ...]
    """Seed sequence of the loader process while it reads this micro-batch: seed, epoch, rank, number."""
    weight: float | None = None
    partners: list[int] = field(default_factory=list)
    """The sample that each one is mixed with. Empty: none is."""
    batch: int = 0
    """Number of the global batch. Random changes of the samples depend on it, and on the epoch."""
    stand_in: int = 0
    """The sample that is read without being counted, if there are none."""

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self.entropy[1]


@dataclass
class Feed:
    """Reads this worker's share of each split, in micro-batches on its device."""

    data: PreparedData
    config: TrainConfig
    layout: Layout
    worker: Worker
    activity: Activity
    order: SampleOrder
    augmentation: Augmentation | None = None
    """The changes of training samples."""
    loader: "Loader" = field(init=False)

    def __post_init__(self) -> None:
        self.loader = Loader(self.data, self.config, self.worker, self.activity, self.augmentation)

    def read_from(self, data: PreparedData, order: SampleOrder) -> None:
        """Switch to other data and their order."""
        self.data, self.order = data, order
        self.loader.read_from(data)

    def train(self, epoch: int, batch_numbers: Sequence[int]) -> Iterator[MicroBatch]:
        """Yield the micro-batches of these global batches of ``epoch``, in order."""
        accumulation, weigh = self.layout.gradient_accumulation, self._weigher(epoch)
        requests = (
            self._request("train", epoch, number * accumulation + place, *part, weigh(part[0], number))
            for number in batch_numbers
            for place, part in enumerate(self._parts(epoch, number))
        )
        return self.loader.read(requests, is_training=True)

    def _parts(self, epoch: int, number: int) -> list[tuple[Indices, Indices | None]]:
        """Return this rank's micro-batches of a global batch, each with the samples that its own are mixed with."""
        count = self.layout.gradient_accumulation
        parts = np.array_split(self.order.share(epoch, number, self._rank), count)
        if self.augmentation is None or self.augmentation.mix is None:
            return [(part, None) for part in parts]
        return list(zip(parts, np.array_split(self.order.partners(epoch, number, self._rank), count), strict=True))

    def validation(self, rows: Indices | None = None) -> Iterator[MicroBatch]:
        """Yield the validation split, or these ascending rows of it. Each sample comes once over all workers."""
        # Twice the size of training: without a backward pass a batch takes less memory.
        batches = validation_share(self.data.validation, self._rank, 2 * self._max_micro_batch, rows)
        return self.loader.read(
            replace(self._request("validation", _VALIDATION_EPOCH, number, indices), stand_in=stand_in)
            for number, (indices, stand_in) in enumerate(batches)
        )

    def close(self) -> None:
        """End the loader's processes, and drop downloads of shards that have not begun."""
        self.loader.close()

    def _weigher(self, epoch: int) -> Callable[[Indices, int], float | None]:
        """Return a function that weighs a micro-batch of a global batch by its targets, where samples differ in them.

        Then the loss of a step is the mean over all its targets, however they are shared out. Where batches differ in
        size and samples have one target each, it weighs by samples.
        """
        num_targets = self.data.train.num_targets
        parts = self.layout.gradient_accumulation * self.layout.data
        if num_targets is None and self.config.tokens_per_batch is None:
            return lambda indices, number: None  # noqa: ARG005
        if num_targets is None:
            return lambda indices, number: parts * len(indices) / self.order.batch_size(epoch, number)

        def weigh(indices: Indices, number: int) -> float:
            whole = self.order.batch(epoch, number)
            return parts * float(num_targets[indices].sum() / num_targets[whole].sum())

        return weigh

    @property
    def _max_micro_batch(self) -> int:
        """Maximum samples of a micro-batch of the longest samples."""
        if self.config.tokens_per_batch is None:
            return self.layout.micro_batch
        lengths = self.data.train.padded_lengths
        assert lengths is not None
        return max(1, self.layout.micro_batch // int(lengths.max()))

    def _request(
        self,
        split: Split,
        epoch: int,
        number: int,
        indices: Indices,
        partners: Indices | None = None,
        weight: float | None = None,
    ) -> BatchRequest:
        """Return the request for micro-batch ``number`` of the epoch. Its seed is the same in a resumed run."""
        entropy = (self.config.seed % 2**64, epoch, self._rank.rank, number)
        mixed_with = [] if partners is None else partners.tolist()
        batch = number // self.layout.gradient_accumulation
        return BatchRequest(split, indices.tolist(), entropy, weight, mixed_with, batch)

    @property
    def _rank(self) -> DataRank:
        return DataRank(self.layout.data_rank(self.worker.rank), self.layout.data)


class Loader:
    """Reads micro-batches onto the worker's device.

    Its processes live as long as the data, so each gets the dataset only once, whatever the start method. Only
    ``num_workers: auto`` starts others in their place. What it has learned holds for the next data, too.
    """

    def __init__(
        self, data: PreparedData, config: TrainConfig, worker: Worker, activity: Activity, changes: Augmentation | None
    ) -> None:
        self.last: MicroBatch | None = None
        """The micro-batch that was read last."""
        self._config, self._worker, self._activity, self._changes = config, worker, activity, changes
        self._requests = _Requests()
        self._loader: DataLoader[MicroBatch] | None = None
        self._batches: Iterator[MicroBatch] = iter(())
        self._read_splits(data)
        processes, prefetch = config.loader.num_workers, config.loader.prefetch_factor
        self._setting, self._read = ReadAhead(0 if processes == "auto" else processes, prefetch), NO_TIME
        is_auto = processes == "auto"
        self._control = ReadingControl.of_worker(worker.device, self._source, self._setting) if is_auto else None

    def read_from(self, data: PreparedData) -> None:
        """Switch to other data, with as many processes as before."""
        self.close()
        self._read_splits(data)

    def _read_splits(self, data: PreparedData) -> None:
        self._reader = _Reader(data, self._changes, self._config.plan.takes_partial_steps)
        self._shards = [shards for split in (data.train, data.validation) if (shards := split.shards)]
        sources: list[Medium] = ["disk" if shards.is_local else "network" for shards in self._shards]
        self._source: Medium = sources[0] if sources else "memory"

    def _open(self) -> DataLoader[MicroBatch]:
        processes, prefetch = self._setting
        return DataLoader(
            self._reader,
            # A request is a whole micro-batch already.
            batch_size=None,
            sampler=self._requests,
            num_workers=processes,
            persistent_workers=processes > 0,
            prefetch_factor=prefetch if processes else None,
            worker_init_fn=_lend_memory,
            pin_memory=self._worker.device.type == "cuda",
            # Its own generator: a draw from torch's default one would change what a resumed run computes.
            generator=torch.Generator().manual_seed(self._config.seed),
        )

    def read(self, requests: Iterable[BatchRequest], is_training: bool = False) -> Iterator[MicroBatch]:
        """Yield a micro-batch for each request. Unread micro-batches of earlier requests are dropped."""
        control = self._control if is_training else None
        remaining = iter(requests)
        while True:
            if self._control and self._control.setting != self._setting:
                self._setting = self._control.setting
                self.close()
            if self._loader is None:
                self._loader = self._open()
            self._requests.begin(remaining)
            self._batches = iter(self._loader)
            yield from self._read_begun(control, is_training)
            if control is None or control.setting == self._setting:
                return
            # The processes have read all that they had begun. New ones take the next request.

    def _read_begun(self, control: ReadingControl | None, is_training: bool) -> Iterator[MicroBatch]:
        """Yield micro-batches until there is no other request, or ``control`` changes how to read."""
        ready = None
        while True:
            began = time.monotonic()
            with self._activity.phase(Phase.DATA):
                batch = next(self._batches, None)
            if batch is None:
                return
            before, ready = ready, time.monotonic()
            if is_training:
                self._read += batch.read
            # The first one waits for processes that start.
            if control and before is not None and control.setting == self._setting:
                num_bytes = sum(tensor.nbytes for tensor in batch.inputs.values())
                line = control.observe(ready - began, ready - before, batch.read, num_bytes)
                if line is not None:
                    self._worker.print(line)
                self._requests.has_ended = control.setting != self._setting
            self.last = batch.to(self._worker.device, self._config)
            yield self.last

    def take_reading(self) -> ReadingRecord:
        """Return how the micro-batches of training since the last call were read."""
        read, self._read = self._read, NO_TIME
        limit = self._control.limit if self._control else None
        return ReadingRecord(processes=self._setting.processes, **read._asdict(), source=self._source, limit=limit)

    def close(self) -> None:
        """End the processes, and cancel shard downloads that have not started."""
        # torch ends them when the last reference is dropped.
        self._loader, self._batches = None, iter(())
        # A process that is forked while a thread downloads would hold the lock of that shard for good.
        for shards in self._shards:
            shards.close()


class _Requests(Sampler[BatchRequest]):
    """The requests that the loader reads next."""

    def __init__(self) -> None:
        self.has_ended = False
        """Whether the loader should stop reading them."""
        self._next: Iterator[BatchRequest] = iter(())

    def begin(self, requests: Iterator[BatchRequest]) -> None:
        """Read these from now on."""
        self._next, self.has_ended = requests, False

    def __iter__(self) -> Iterator[BatchRequest]:
        requests = self._next
        while not self.has_ended and (request := next(requests, None)) is not None:
            yield request


class _Reader(TorchDataset[MicroBatch]):
    """Reads requested micro-batches, in a process of the loader or in the training process."""

    def __init__(self, data: PreparedData, augmentation: Augmentation | None, drops_absent: bool) -> None:
        self._splits: Mapping[Split, Dataset] = {"train": data.train, "validation": data.validation}
        self._augmentation, self._drops_absent = augmentation, drops_absent
        self.lender: Lender | None = None
        """The pool of shared memory in a loader process. None in the training process."""

    def __getitem__(self, request: BatchRequest) -> MicroBatch:
        reads_ahead = self.lender is not None
        if reads_ahead:
            # Only the loader's own processes are seeded. The training process is seeded for each step.
            seed_random(int(np.random.SeedSequence(request.entropy).generate_state(1, np.uint64)[0]))
        began = ReadTime.now(of_process=reads_ahead)
        # An empty batch has the shape of one sample that does not count, because some ranks must compute along.
        batch = self._read(request)
        absent = batch.absent if self._drops_absent else ()
        to_tensor = self.lender.tensor if self.lender else torch.from_numpy
        inputs = {name: to_tensor(given) for name, given in batch.inputs.items() if name not in absent}
        targets = torch.from_numpy(batch.targets)
        taught = None if batch.taught is None else torch.from_numpy(batch.taught)
        if not request.indices:
            targets = torch.full_like(targets, math.nan if targets.is_floating_point() else IGNORED)
        return MicroBatch(inputs, targets, taught, request.weight, ReadTime.now(of_process=reads_ahead) - began)

    def _read(self, request: BatchRequest) -> Batch:
        samples = self._splits[request.split]
        if self._augmentation is None or request.split != "train" or not request.indices:
            return samples.batch(request.indices or [request.stand_in])
        assert isinstance(samples, LabelledDataset)
        return self._augmentation.batch(samples, request.indices, request.partners, request.epoch, request.batch)


def _lend_memory(process: int) -> None:  # noqa: ARG001
    """Make a loader process build batches in memory that it shares with training."""
    info = get_worker_info()
    assert info is not None
    reader = cast(_Reader, info.dataset)
    reader.lender = Lender()
    allocate_with(reader.lender.array)
