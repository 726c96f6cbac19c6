"""Readers of the same texts on S3, each in two processes, and what each takes."""

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Queue

import psutil
from pydantic import BaseModel

from app.data.sharded import ShardReference
from app.training.data.batches import DataRank
from app.training.data.shard_order import ShardOrder

RANKS, BATCH = 2, 128
_TIMEOUT_S = 280.0


class Source(BaseModel):
    """Where the texts lie: as one Parquet file, and as shards."""

    parquet: str
    shards: ShardReference
    seek_to: int = 0
    """Step at which our reader begins."""


@dataclass(frozen=True)
class Share:
    """What one process has read, and what that took."""

    rows: int
    characters: int
    wall_s: float
    cpu_s: float
    first_batch_s: float
    peak_bytes: int
    """Most private memory (USS) above what the process took before it read."""


Texts = Iterator[list[str]]


def our_texts(source: Source, rank: int) -> Texts:
    """The rank's part of each batch of an epoch, from canonical streams."""
    rows = source.shards.open("train")
    order = ShardOrder(rows, BATCH, 0)
    for number in range(source.seek_to, order.num_batches(1)):
        yield rows.read(order.share(1, number, DataRank(rank, RANKS)))["input"].to_pylist()


def datasets_texts(source: Source, rank: int) -> Texts:
    """Hugging Face datasets, streamed, shuffled in its buffer and split by node."""
    from datasets import load_dataset
    from datasets.distributed import split_dataset_by_node

    stream = load_dataset("parquet", data_files=source.parquet, split="train", streaming=True)
    stream = split_dataset_by_node(stream.shuffle(seed=0, buffer_size=10_000), rank, RANKS)
    for batch in stream.iter(BATCH // RANKS):
        yield batch["text"]


def ray_data_texts(source: Source, rank: int) -> Texts:
    """Ray Data in one process with the CPUs of both, shuffled in its buffer."""
    if rank:
        return
    import ray

    ray.init(num_cpus=RANKS, logging_level="error", log_to_driver=False, include_dashboard=False)
    data = ray.data.read_parquet(source.parquet, columns=["text"])
    for batch in data.iter_batches(batch_size=BATCH, local_shuffle_buffer_size=10_000, batch_format="pyarrow"):
        yield batch["text"].to_pylist()


READERS: dict[str, Callable[[Source, int], Texts]] = {
    "Rayloom": our_texts,
    "datasets": datasets_texts,
    "Ray Data": ray_data_texts,
}


def read(reader: str, source: Source) -> list[Share]:
    """Read the texts in two new processes. Raises queue.Empty if one does not end."""
    context = multiprocessing.get_context("spawn")
    queue: Queue[Share] = context.Queue()  # type: ignore[assignment]
    processes = [context.Process(target=_read_share, args=(reader, source, rank, queue)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    try:
        return [queue.get(timeout=_TIMEOUT_S) for _ in processes]
    finally:
        for process in processes:
            process.join(20)
            process.terminate()


def _read_share(reader: str, source: Source, rank: int, queue: "Queue[Share]") -> None:
    started, cpu_s = time.perf_counter(), time.process_time()
    rows = characters = 0
    first_batch_s = 0.0
    with _PeakMemory() as memory:
        for texts in READERS[reader](source, rank):
            first_batch_s = first_batch_s or time.perf_counter() - started
            rows, characters = rows + len(texts), characters + sum(map(len, texts))
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
    queue.put(Share(rows, characters, wall_s, cpu_s, first_batch_s, memory.growth))


class _PeakMemory:
    """Samples the private memory of this process twenty times a second."""

    def __init__(self) -> None:
        self._process, self._done = psutil.Process(), threading.Event()
        self._before = self._peak = self._process.memory_full_info().uss

    @property
    def growth(self) -> int:
        return self._peak - self._before

    def __enter__(self) -> "_PeakMemory":
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.05):
            self._peak = max(self._peak, self._process.memory_full_info().uss)
