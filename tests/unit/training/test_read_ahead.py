"""``train.loader.num_workers: auto``: reading keeps up with training, in the same order, or says what bounds it."""

import io
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from app.config import Recipe, load_recipe
from app.data.prepared import Batch, Dataset, PreparedData
from app.tasks import prepare
from app.telemetry.record import NO_TIME, ReadAhead, ReadingRecord, ReadTime, bound_of
from app.training.activity import Activity
from app.training.data import reading as reading_module
from app.training.data.feed import Feed
from app.training.data.reading import ReadingControl, Resources
from app.training.data.recipe_order import order_of
from app.training.worker import Worker
from tests.helpers import ROOT
from tests.s3 import S3Server

AUTO = "train.loader={num_workers: auto}"
GIB = 2.0**30


def control(
    cores: float = 8.0, free: float = 64 * GIB, process: float = 0.1 * GIB, source: Any = "memory"
) -> ReadingControl:
    return ReadingControl(Resources(cores, lambda: free, lambda: process), source, ReadAhead(0, 2))


def train_with(reading: ReadingControl, read: ReadTime, compute_s: float, batches: int = 2000) -> list[str]:
    """Train on a virtual machine where as many processes as are set read in parallel. Return the log."""
    lines = []
    for _ in range(batches):
        if processes := reading.setting.processes:
            waited = max(0.0, read.seconds / processes - compute_s)
            elapsed = max(read.seconds / processes, compute_s)
        else:
            waited, elapsed = read.seconds, read.seconds + compute_s
        if line := reading.observe(waited, elapsed, read, 1_000_000):
            lines.append(line)
    return lines


def test_processes_are_added_until_training_hardly_waits_and_no_more() -> None:
    reading = control()
    lines = train_with(reading, ReadTime(0.05, 0.05), compute_s=0.01)
    assert 5 <= reading.setting.processes <= 7
    assert reading.limit is None
    assert len(lines) == 3
    assert ": now read by 3 processes, 2 micro-batches ahead each" in lines[1]
    reading = control()
    assert train_with(reading, ReadTime(0.0001, 0.0001), compute_s=0.01) == []
    assert reading.setting == ReadAhead(0, 2)


def test_cores_bound_decoding_but_not_waiting_for_a_network() -> None:
    decoding, waiting = control(cores=2.0), control(cores=2.0, source="network")
    lines = train_with(decoding, ReadTime(0.05, 0.05), compute_s=0.01)
    assert (decoding.setting.processes, decoding.limit) == (2, "cores")
    assert "bound by CPU cores, read by 2 processes: more would not help" in lines[-1]
    train_with(waiting, ReadTime(0.1, 0.005), compute_s=0.01)
    assert 10 <= waiting.setting.processes <= 15


def test_memory_bounds_the_processes() -> None:
    full = control(free=0.01 * GIB, process=0.6 * GIB)
    lines = train_with(full, ReadTime(0.05, 0.05), compute_s=0.01)
    assert (full.setting.processes, full.limit) == (0, "memory")
    assert len(lines) == 1
    assert "bound by free memory" in lines[0]
    # Beside what a process is, it holds the micro-batches that it reads ahead.
    full = control(free=0.6 * GIB, process=0.1 * GIB)
    for _ in range(2000):
        full.observe(0.05, 0.06, ReadTime(0.05, 0.05), int(0.2 * GIB))
    assert (full.setting.processes, full.limit) == (2, "memory")


def test_a_source_that_gives_no_more_to_more_processes_is_named() -> None:
    reading = control(source="network")
    lines: list[str] = []
    for _ in range(3000):
        # A micro-batch every 50 ms, however many ask for it.
        asking = max(1, reading.setting.processes)
        lines += filter(None, [reading.observe(0.045, 0.05, ReadTime(0.05 * asking, 0.001), 1_000_000)])
    assert reading.setting.processes <= 7
    assert "bound by the network" in lines[-1]
    assert len(lines) <= 4


def test_late_single_micro_batches_are_met_by_reading_farther_ahead() -> None:
    reading = control()
    reading.setting = ReadAhead(4, 2)
    for number in range(400):
        late = number % 10 == 0
        reading.observe(0.05 if late else 0.0, 0.07 if late else 0.02, ReadTime(0.02, 0.02), 1_000_000)
    assert reading.setting.processes == 4
    assert reading.setting.prefetch > 2


def test_what_bounds_reading_is_told_by_where_its_time_went() -> None:
    assert bound_of(ReadTime(1.0, 0.9, 0.05), "network") == "decoding"
    assert bound_of(ReadTime(1.0, 0.1, 0.0), "network") == "network"
    assert bound_of(ReadTime(1.0, 0.2, 0.7), "disk") == "cores"
    assert bound_of(ReadTime(1.0, 0.1, 0.0), "memory") == "decoding"
    record = ReadingRecord(processes=2, seconds=1.0, cpu_s=0.9, queued_s=0.0, source="disk")
    assert str(record) == "bound by decoding, read by 2 processes"
    waiting = record.model_copy(update={"processes": 1, "seconds": 9.0})
    assert str(record + waiting) == "bound by the disk, read by 1 process"
    assert str(waiting.model_copy(update={"limit": "memory"})) == "bound by free memory, read by 1 process"


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large JPEGs in folders of two labels: decoding one takes tens of milliseconds."""
    folder, generator = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    for number in range(24):
        levels = generator.integers(0, 255, (24, 24, 3), np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(levels).resize((1200, 1200)).save(buffer, "JPEG")
        file = folder / ("even", "odd")[number % 2] / f"{number}.jpg"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(buffer.getvalue())
    return folder


def opened(recipe: Recipe, data: PreparedData) -> Feed:
    worker = Worker(0, 1, torch.device("cpu"))
    return Feed(data, recipe.train, recipe.train.layout(1), worker, Activity(), order_of(recipe, data))


def train_on(feed: Feed, epochs: Iterable[int]) -> Iterator[bytes]:
    """Compute a little on each micro-batch, and yield what it holds."""
    for epoch in epochs:
        for batch in feed.train(epoch, range(feed.order.num_batches(epoch))):
            time.sleep(0.02)
            yield (
                b"".join(tensor.numpy().tobytes() for tensor in batch.inputs.values()) + batch.targets.numpy().tobytes()
            )


def test_large_photographs_are_decoded_in_other_processes_and_come_in_the_same_order(
    photographs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # There are cores enough, whatever else runs on this machine.
    monkeypatch.setattr(Resources, "of_machine", lambda _: control(cores=4.0).resources)
    monkeypatch.setattr(reading_module, "_WINDOW_S", 0.3)
    keys = [f"data.source={photographs}", "data.image={size: 16, channels: 3}", "train.global_batch_size=2"]
    recipe = load_recipe(ROOT / "recipes/digits.yaml", [*keys, AUTO])
    data = prepare(recipe)
    with closing(opened(recipe, data)) as feed:
        seen = list(train_on(feed, range(1, 4)))
        reading = feed.loader.take_reading()
        assert feed.loader.take_reading().seconds == NO_TIME.seconds
    assert reading.processes >= 1
    assert reading.source == "disk"
    assert "of a step is spent waiting for data: now read by 1 process" in capsys.readouterr().out
    plain, began_s = load_recipe(ROOT / "recipes/digits.yaml", keys), time.process_time()
    with closing(opened(plain, data)) as feed:
        assert seen == list(train_on(feed, range(1, 4)))
    alone_s = time.process_time() - began_s
    assert reading.cpu_s > alone_s / 2, "as much is decoded, wherever that happens"


@dataclass(frozen=True)
class Slow(Dataset):
    """Samples that take long to read. Their target is the id of the process that read them."""

    def __len__(self) -> int:
        return 40

    @property
    def lengths(self) -> list[int]:
        return [0] * len(self)

    def batch(self, indices: Sequence[int]) -> Batch:
        time.sleep(0.02)
        return Batch({"number": np.array(indices, np.float32)}, np.full(len(indices), os.getpid()))


@dataclass(frozen=True)
class SlowData:
    """The two splits, which are all that a feed reads."""

    train: Slow = Slow()
    validation: Slow = Slow()


def test_a_change_after_the_last_batch_of_an_epoch_is_made_before_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Resources, "of_machine", lambda _: control(cores=4.0).resources)
    monkeypatch.setattr(reading_module, "_WINDOW_S", 0.0)
    monkeypatch.setattr(reading_module, "_WINDOW_BATCHES", 1)
    recipe = load_recipe(ROOT / "recipes/digits.yaml", [AUTO, "train.global_batch_size=20"])
    data: Any = SlowData()
    with closing(opened(recipe, data)) as feed:
        # A step takes what it needs of the epoch, and never asks for more.
        readers = [
            {int(pid) for batch in islice(feed.train(epoch, [0, 1]), 2) for pid in batch.targets} for epoch in (1, 2)
        ]
    assert readers[0] == {os.getpid()}
    assert os.getpid() not in readers[1]


def test_the_data_of_a_further_micro_epoch_are_read_with_what_was_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Resources, "of_machine", lambda _: control(cores=4.0).resources)
    monkeypatch.setattr(reading_module, "_WINDOW_S", 0.0)
    recipe = load_recipe(ROOT / "recipes/digits.yaml", [AUTO, "train.global_batch_size=2"])
    data: Any = SlowData()
    with closing(opened(recipe, data)) as feed:
        first = list(train_on(feed, [1]))
        learned = feed.loader.take_reading().processes
        assert learned > 0
        monkeypatch.setattr(reading_module, "_WINDOW_BATCHES", 1000)
        other: Any = SlowData()
        feed.read_from(other, order_of(recipe, other))
        assert len(list(train_on(feed, [2]))) == len(first)
        assert feed.loader.take_reading().processes >= learned


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_a_slow_network_is_named(storage: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [f"storage={storage}", "data.shards={size: 30KB, window: 30KB}", "train.global_batch_size=32", AUTO]
    recipe = load_recipe(ROOT / "recipes/digits.yaml", keys)
    data = prepare(recipe)
    monkeypatch.setattr(Resources, "of_machine", lambda _: control(cores=4.0).resources)
    monkeypatch.setattr(s3_server, "delay_s", 0.25)
    with closing(opened(recipe, data)) as feed:
        assert len(set(train_on(feed, [1]))) == feed.order.num_batches(1)
        reading = feed.loader.take_reading()
    assert reading.source == "network"
    assert str(reading).startswith("bound by the network, read by")


def test_a_worker_gets_its_share_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    alone = Resources.of_machine(torch.device("cuda"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    one_of_two = Resources.of_machine(torch.device("cuda"))
    assert one_of_two.cores < alone.cores or alone.cores == 0.5
    assert 0 < one_of_two.free_bytes() < alone.free_bytes()
    assert alone.process_bytes() >= 0.0
