"""The order of samples in shards: canonical streams, computed window by window, for any number of workers.

An epoch shuffles the shards and lays their rows end to end. V streams each take an equal part of them. A window is the
same steps of all streams. Within it each stream shuffles its rows and gives ``batch_size / V`` of them to each batch.
V depends on the data and the batch size alone, so batches are the same for any number of workers. A rank takes its
part of a batch from streams of its own where V is a multiple of the ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from app.data.prepared import ShardedSamples
from app.training.data.batches import BATCHES_PER_SORT, DataRank, Indices, SampleOrder, partners_of

SHARD_ORDER = "streams-1"
"""Name of the sample order of ``ShardOrder``. A change of the order needs a new name."""
_MAX_STREAMS = 16
_NEIGHBOURS = 2
"""Block of ``partners_of``: a rank has consecutive samples of a batch."""
_MAX_WINDOW_ROWS = 2**20
"""Small samples: a window's rows are listed in memory."""
_SHARDS, _BATCHES, _ROWS = range(3)
"""What is shuffled. Each has random numbers of its own."""

Segment = tuple[int, int, int]
"""Consecutive rows of a shard: its number, the first row, and the row after the last."""


@dataclass
class ShardOrder(SampleOrder):
    """The global batches of sharded samples, each of ``size`` samples."""

    name: ClassVar[str] = SHARD_ORDER

    samples: ShardedSamples
    size: int
    seed: int
    _parts: dict[tuple[int, int, int], Indices] = field(default_factory=dict, init=False)
    """Rows of the window under way, by epoch, window and stream."""
    _epochs: dict[int, "_Epoch"] = field(default_factory=dict, init=False)

    @cached_property
    def num_streams(self) -> int:
        """V: the largest power of two up to 16 that divides the batch, and is no larger than the number of shards."""
        shards, streams = len(self.samples.shard_rows), 1
        while streams < _MAX_STREAMS and self.size % (2 * streams) == 0 and 2 * streams <= shards:
            streams *= 2
        return streams

    def num_batches(self, epoch: int) -> int:  # noqa: ARG002
        """Return the number of full batches. Other rows are left out of each epoch."""
        return self._num_batches

    @cached_property
    def _num_batches(self) -> int:
        return len(self.samples) // self.size

    @cached_property
    def steps_per_window(self) -> int:
        """Number of batches whose samples are shuffled together."""
        return max(1, min(self.samples.window_rows, _MAX_WINDOW_ROWS) // self.size)

    def batch(self, epoch: int, number: int) -> Indices:
        """Return a global batch, as indices of shape (size,)."""
        return self.share(epoch, number, DataRank(0, 1))

    def share(self, epoch: int, number: int, data_rank: DataRank) -> Indices:
        """Return a rank's part of global batch ``number`` of an epoch. Only the streams that it is in are computed."""
        window, step = divmod(number, self.steps_per_window)
        count = self.size // data_rank.size
        start, stop = data_rank.rank * count, (data_rank.rank + 1) * count
        per_stream = self.size // self.num_streams
        streams = range(start // per_stream, -(-stop // per_stream))
        self._enter(epoch, window, streams)
        parts = [self._parts[epoch, window, stream][step] for stream in streams]
        first = start - streams.start * per_stream
        return np.concatenate(parts)[first : first + count]

    def partners(self, epoch: int, number: int, data_rank: DataRank) -> Indices:
        """Return the sample that each one of ``share`` is mixed with: its neighbour."""
        count = self.size // data_rank.size
        if count % _NEIGHBOURS == 0:
            return partners_of(self.share(epoch, number, data_rank), _NEIGHBOURS)
        first = data_rank.rank * count
        return partners_of(self.batch(epoch, number), _NEIGHBOURS)[first : first + count]

    def _enter(self, epoch: int, window: int, streams: range) -> None:
        """Compute a window for some streams, and have the next one's shards fetched."""
        if all((epoch, window, stream) in self._parts for stream in streams):
            return
        self._parts.clear()
        # All of the window is on its way before the first lengths are read.
        self.samples.prefetch(self._shards_of(epoch, window, streams))
        for stream in streams:
            self._parts[epoch, window, stream] = self._shuffled(epoch, window, stream)
        is_last = (window + 1) * self.steps_per_window >= self._num_batches
        following = (epoch + 1, 0) if is_last else (epoch, window + 1)
        self.samples.prefetch(self._shards_of(*following, streams))

    def _shards_of(self, epoch: int, window: int, streams: range) -> list[int]:
        return list(dict.fromkeys(shard for stream in streams for shard, _, _ in self._segments(epoch, window, stream)))

    def _segments(self, epoch: int, window: int, stream: int) -> list[Segment]:
        """Return the rows of a stream in a window, before they are shuffled."""
        per_stream = self.size // self.num_streams
        first = window * self.steps_per_window
        last = min(first + self.steps_per_window, self._num_batches)
        start = stream * self._num_batches * per_stream
        return self._epoch(epoch).segments(start + first * per_stream, start + last * per_stream)

    def _shuffled(self, epoch: int, window: int, stream: int) -> Indices:
        """Return the rows of a stream in a window, of shape (steps, rows a step)."""
        per_stream = self.size // self.num_streams
        rows, lengths = self._rows(self._segments(epoch, window, stream))
        order = self._generator(_ROWS, epoch, window, stream).permutation(len(rows))
        if lengths is not None:
            group = np.arange(len(rows)) // (BATCHES_PER_SORT * per_stream)
            order = order[np.lexsort((lengths[order], group))]
        parts = rows[order].reshape(-1, per_stream)
        # All streams permute their parts alike, so that the parts of a batch have similar lengths.
        return parts[self._generator(_BATCHES, epoch, window).permutation(len(parts))]

    def _rows(self, segments: list[Segment]) -> tuple[Indices, NDArray[np.int32] | None]:
        """Return the indices of rows, and their lengths; None if all are equal."""
        rows = [self.samples.first_rows[shard] + np.arange(start, stop) for shard, start, stop in segments]
        if self.samples.has_one_length:
            return np.concatenate(rows), None
        lengths = [self.samples.lengths_of(shard)[start:stop] for shard, start, stop in segments]
        return np.concatenate(rows), np.concatenate(lengths)

    def _epoch(self, epoch: int) -> "_Epoch":
        if epoch not in self._epochs:
            generator = self._generator(_SHARDS, epoch)
            shards = generator.permutation(len(self.samples.shard_rows))
            # The rows that are left out at the end are of another shard, or another part of it, in each epoch.
            offset = int(generator.integers(len(self.samples)))
            self._epochs = {**dict([*self._epochs.items()][-1:]), epoch: _Epoch(self.samples, shards, offset)}
        return self._epochs[epoch]


class _Epoch:
    """The rows of all shards, laid end to end in the epoch's order of shards, from a row within it."""

    def __init__(self, samples: ShardedSamples, shards: NDArray[np.int64], offset: int) -> None:
        self._shards, self._offset = shards, offset
        self._starts = np.concatenate([[0], np.cumsum(np.asarray(samples.shard_rows)[shards])])
        """Position of the first row of each shard, and the number of all rows."""

    def segments(self, start: int, stop: int) -> list[Segment]:
        """Return the rows from position ``start`` to ``stop``. After the last position comes the first one."""
        size = int(self._starts[-1])
        start, stop = start + self._offset, stop + self._offset
        inner = [(start, min(stop, size)), (max(start, size) - size, stop - size)]
        return [segment for first, last in inner for segment in self._within(first, last)]

    def _within(self, start: int, stop: int) -> Iterator[Segment]:
        place = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            first, after = int(self._starts[place]), int(self._starts[place + 1])
            end = min(stop, after)
            if end > start:
                yield int(self._shards[place]), start - first, end - first
            start, place = end, place + 1
