"""Loader processes start once, and draw the same random numbers wherever a run resumes."""

import os
import pickle
import random
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.config import Layout, TrainConfig, load_recipe
from app.config.layout import lay_out
from app.config.plan import PlanConfig
from app.config.train import LoaderConfig
from app.data.augmentation import augmentation_of
from app.data.prepared import Batch, Dataset
from app.tasks import prepare
from app.training.activity import Activity
from app.training.data.feed import Feed, MicroBatch
from app.training.data.lending import Lender
from app.training.data.recipe_order import order_of
from app.training.worker import Worker
from tests.orders import in_memory

SAMPLES, BATCH = 64, 16


@dataclass(frozen=True)
class Noise(Dataset):
    """Samples of random numbers, with the id of the reading process as target."""

    size: int

    def __len__(self) -> int:
        return self.size

    @property
    def lengths(self) -> list[int]:
        return [0] * self.size

    def batch(self, indices: Sequence[int]) -> Batch:
        noise = [[torch.rand(()).item(), np.random.random(), random.random()] for _ in indices]
        return Batch({"noise": np.array(noise)}, np.full(len(indices), os.getpid()))


@dataclass(frozen=True)
class NoiseData:
    """The two splits, which are all of the prepared data that a feed reads."""

    train: Noise = Noise(SAMPLES)
    validation: Noise = Noise(SAMPLES)


@contextmanager
def feed(rank: int = 0, num_workers: int = 2, seed: int = 0) -> Iterator[Feed]:
    """Open the feed of one of two ranks, in micro-batches of 4."""
    loader = {"num_workers": num_workers}
    config = TrainConfig.model_validate({"global_batch_size": BATCH, "seed": seed, "loader": loader, "workers": 2})
    layout: Layout = lay_out(PlanConfig(micro_batch=4), BATCH, workers=2)
    worker = Worker(rank, 2, torch.device("cpu"))
    data: Any = NoiseData()
    with closing(Feed(data, config, layout, worker, Activity(), in_memory([0] * SAMPLES, BATCH, seed))) as opened:
        yield opened


def noise_of(opened: Feed, epoch: int, first: int = 0) -> list[list[float]]:
    """Return the random numbers of each micro-batch, from global batch ``first`` of the epoch."""
    numbers = range(first, opened.order.num_batches(epoch))
    return [batch.inputs["noise"].flatten().tolist() for batch in opened.train(epoch, numbers)]


def test_no_two_micro_batches_of_a_run_have_the_same_random_numbers() -> None:
    drawn = []
    for rank in (0, 1):
        with feed(rank) as opened:
            drawn += [*noise_of(opened, 1), *noise_of(opened, 2)]
    numbers = [number for batch in drawn for number in batch]
    assert len(set(numbers)) == len(numbers) == 2 * SAMPLES * 3


def test_a_run_that_goes_on_draws_the_random_numbers_that_it_would_have_drawn() -> None:
    with feed() as opened:
        whole = noise_of(opened, 1)
    with feed(num_workers=1) as opened:
        assert noise_of(opened, 1, first=2) == whole[4:]
    with feed(seed=-1) as opened:
        assert noise_of(opened, 1) != whole


def test_the_processes_that_read_ahead_live_as_long_as_the_run() -> None:
    with feed() as opened:
        readers = [
            {int(pid) for batch in batches for pid in batch.targets}
            for batches in (opened.train(1, range(4)), opened.validation(), opened.train(2, range(4)))
        ]
        abandoned = opened.train(3, range(4))
        next(abandoned)
        assert {len(batch.targets) for batch in opened.train(3, [0])} == {4}
        assert readers[0] == readers[1] == readers[2]
        assert len(readers[0]) == 2
        assert os.getpid() not in readers[0]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in readers[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_the_training_process_reads_without_touching_its_own_sequence(rank: int) -> None:
    """Dropout draws from this sequence, and checkpoints keep its state."""
    with feed(rank, num_workers=0) as opened:
        torch.manual_seed(5)
        drawn = torch.rand(4, 8).tolist()
        torch.manual_seed(5)
        read = torch.cat([batch.inputs["noise"][:, 0] for batch in opened.train(1, range(4))])
    assert read.tolist() == pytest.approx([number for row in drawn for number in row])


@contextmanager
def pictures(processes: int) -> Iterator[Iterator[MicroBatch]]:
    """Yield the first micro-batches of three epochs of augmented pictures."""
    keys = ["train.augment={image: {crop: 0.6, color: 0.5}}", "train.global_batch_size=16"]
    recipe = load_recipe("recipes/digits.yaml", keys)
    config = recipe.train.model_copy(update={"loader": LoaderConfig(num_workers=processes)})
    data, worker = prepare(recipe), Worker(0, 1, torch.device("cpu"))
    order, changes = order_of(recipe, data), augmentation_of(recipe.train, data)
    with closing(Feed(data, config, config.layout(1), worker, Activity(), order, changes)) as opened:
        yield chain.from_iterable(opened.train(epoch, range(30)) for epoch in (1, 2, 3))


def test_loader_processes_read_the_same_pictures_as_the_training_process() -> None:
    read = []
    for processes in (0, 2):
        with pictures(processes) as batches:
            read.append([batch.inputs["pixel_values"].numpy().tobytes() for batch in batches])
    assert len(read[0]) > 50
    assert read[0] == read[1]


def test_memory_is_reused_once_its_batch_is_dropped() -> None:
    held, memory = [], list[str]()
    with pictures(processes=1) as batches:
        for number, batch in enumerate(batches):
            pixels = batch.inputs["pixel_values"]
            memory.append(inode_at(pixels.data_ptr()))
            if number % 20 == 0:
                held.append((pixels[1:], pixels[1:].clone()))
            del batch, pixels
    assert all(torch.equal(view, copy) for view, copy in held)
    assert len(held) > 2
    assert "0" not in memory  # it is shared
    assert len(set(memory)) < len(memory) / 4


def test_memory_is_not_reused_while_a_view_uses_it() -> None:
    lender, shape, dtype = Lender(), (4, 8), np.dtype(np.float32)
    address = (first := lender.array(shape, dtype)).ctypes.data
    view = first[1:]
    del first
    assert lender.array(shape, dtype).ctypes.data != address
    del view
    assert lender.array((3, 8), dtype).ctypes.data == address


def test_memory_is_not_reused_while_a_second_input_has_it() -> None:
    lender, shape, dtype = Lender(), (4, 8), np.dtype(np.float32)
    pictures = lender.array(shape, dtype)
    pictures[:] = 1
    sent = [bytes(ForkingPickler.dumps(lender.tensor(given))) for given in (pictures, pictures[:2])]
    del pictures
    _, second = map(pickle.loads, sent)
    lender.array(shape, dtype)[:] = 2
    assert second.tolist() == [[1] * 8] * 2


def test_a_fork_gives_no_memory_back_that_its_parent_uses() -> None:
    lender, shape, dtype = Lender(), (4, 8), np.dtype(np.float32)
    address = (first := lender.array(shape, dtype)).ctypes.data
    sent = bytes(ForkingPickler.dumps(lender.tensor(first)))
    del first
    received = pickle.loads(sent)
    if (child := os.fork()) == 0:
        del received
        os._exit(0)
    os.waitpid(child, 0)
    assert lender.array(shape, dtype).ctypes.data != address
    del received
    assert lender.array(shape, dtype).ctypes.data == address


def inode_at(address: int) -> str:
    """Return the inode of the file mapped at an address of this process."""
    for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
        span, _, _, _, inode, *_ = line.split()
        start, end = (int(bound, 16) for bound in span.split("-"))
        if start <= address < end:
            return inode
    raise AssertionError("nothing is mapped there")
