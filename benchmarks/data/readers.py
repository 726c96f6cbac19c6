"""Readers of the same texts on S3, each in two processes, and what each takes."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from queue import Queue

from pydantic import BaseModel

from app.data.sharded import INPUT, ShardReference
from app.training.data.order import SampleOrder
from app.training.data.ranks import DataRank
from app.training.data.rules import Rules
from benchmarks.data.memory import PeakMemory

RANKS, BATCH = 2, 128
_TIMEOUT_S = 590.0


class Source(BaseModel):
    """Where the texts lie: as Parquet files, and as shards."""

    parquet: str
    """Folder of the files."""
    shards: ShardReference
    seek_to: int = 0
    """Step at which our reader begins."""
    max_rows: int | None = None
    """Rows after which a process stops. None: it reads an epoch."""


@dataclass(frozen=True)
class Share:
    """What one process has read, and what that took."""

    rows: int
    characters: int
    wall_s: float
    imports_s: float
    """Seconds of the wall time that imports took."""
    first_batch_s: float
    """Seconds from the start to the first batch, with the imports; infinite if there was none."""
    first_rows: int
    """Rows of the first batch."""
    cpu_s: float
    """Of this process and of those that it has started and waited for."""
    peak_bytes: int
    """Most private memory (USS) above what the process took before it read."""


@dataclass(frozen=True)
class Reading:
    """What all processes of a reader have read."""

    shares: Sequence[Share]

    @property
    def wall_s(self) -> float:
        """Seconds from the start to the end of the last process."""
        return max(share.wall_s for share in self.shares)

    @property
    def first_batch_s(self) -> float:
        """Seconds until each process that reads had its first batch."""
        return max(share.first_batch_s for share in self.shares if share.rows)

    @property
    def seek_s(self) -> float:
        """The same after the imports."""
        return max(share.first_batch_s - share.imports_s for share in self.shares if share.rows)

    @property
    def rate(self) -> float:
        """Rows a second, with imports and the first batch."""
        return sum(share.rows for share in self.shares) / self.wall_s

    @property
    def megabytes(self) -> float:
        """Millions of characters a second, with imports and the first batch. All are ASCII."""
        return sum(share.characters for share in self.shares) / self.wall_s / 1e6

    @property
    def steady_rate(self) -> float:
        """Rows a second from the first batch on."""
        return sum(
            (share.rows - share.first_rows) / (share.wall_s - share.first_batch_s)
            for share in self.shares
            if share.rows
        )

    @property
    def rows_per_cpu_s(self) -> float:
        """Rows for each second of CPU time of the processes, without the server's."""
        return sum(share.rows for share in self.shares) / sum(share.cpu_s for share in self.shares)

    @property
    def peak_bytes(self) -> int:
        """The largest of the processes' peaks."""
        return max(share.peak_bytes for share in self.shares)


Texts = Iterator[list[str]]


def our_texts(source: Source, rank: int) -> Texts:
    """The rank's part of each batch of an epoch, from its own streams."""
    with closing(source.shards.open("train")) as rows:
        order = SampleOrder(rows, Rules(BATCH), 0)
        for number in range(source.seek_to, order.num_batches(1)):
            yield rows.read_arrays(order.share(1, number, DataRank(rank, RANKS)), INPUT)[0].tolist()


def datasets_texts(source: Source, rank: int) -> Texts:
    """Hugging Face datasets, streamed, shuffled in its buffer and split by node."""
    from datasets import load_dataset
    from datasets.distributed import split_dataset_by_node

    files = f"{source.parquet}/*.parquet"
    stream = load_dataset("parquet", data_files=files, split="train", streaming=True, columns=["text"])
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


def read(reader: str, source: Source) -> Reading:
    """Read the texts in two new processes. Raises queue.Empty if one does not end."""
    context = multiprocessing.get_context("spawn")
    queue: Queue[Share] = context.Queue()  # type: ignore[assignment]
    started = time.time()
    arguments = [(reader, source, rank, queue, started) for rank in range(RANKS)]
    processes = [context.Process(target=_read_share, args=given) for given in arguments]
    for process in processes:
        process.start()
    try:
        return Reading([queue.get(timeout=_TIMEOUT_S) for _ in processes])
    finally:
        for process in processes:
            process.join(20)
            process.terminate()


def _read_share(reader: str, source: Source, rank: int, queue: "Queue[Share]", started: float) -> None:
    """Read one rank's share. ``started`` is the time when the process was asked for."""
    imports_s, cpu_s = time.time() - started, _cpu_s()
    rows = characters = first_rows = 0
    first_batch_s = float("inf")
    with PeakMemory() as memory:
        for texts in READERS[reader](source, rank):
            if not rows:
                first_batch_s, first_rows = time.time() - started, len(texts)
            rows, characters = rows + len(texts), characters + sum(map(len, texts))
            if source.max_rows and rows >= source.max_rows:
                break
    wall_s = time.time() - started
    queue.put(Share(rows, characters, wall_s, imports_s, first_batch_s, first_rows, _cpu_s() - cpu_s, memory.growth))


def _cpu_s() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system
