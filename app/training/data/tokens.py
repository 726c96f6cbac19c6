"""Batches of similar lengths that are filled up to a budget of padded tokens, the same for any number of workers.

An epoch shuffles the shards and puts them into windows; data in memory are one window. A window's samples are sorted by
length, longest first and shuffled among equals, and cut: a batch takes as many as fit if all were as long as its first.
So the number of batches follows from how many samples have each length, and is known before any sample is read. Lengths
are rounded up to eight steps an octave, so that a batch has other samples in each epoch, unless their lengths are rare.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from app.config import TrainConfig
from app.data.prepared import PreparedData
from app.errors import RecipeError, TrainingError
from app.training.data.batches import Indices, SampleOrder

Key = TypeVar("Key")
Value = TypeVar("Value")
_WINDOWS, _ROWS = range(2)
"""The kinds of shuffles. Each has its own random numbers."""


def token_order_of(config: TrainConfig, data: PreparedData) -> "TokenOrder":
    """Return the order of a recipe with ``train.tokens_per_batch``.

    Raises:
        RecipeError: the samples are not padded, so that they have no length in tokens.
        TrainingError: the longest sample does not fit into a batch, or a batch has too few samples for all workers.
    """
    assert config.tokens_per_batch is not None
    lengths = data.train.padded_lengths
    if lengths is None:
        raise RecipeError(
            "train.tokens_per_batch is for texts and tokens, and the samples of this task have no length in tokens: "
            "set train.global_batch_size in its place"
        )
    shards = data.train.shards
    rows = shards.shard_rows if shards else [len(lengths)]
    per_window = max(1, round(shards.window_rows * len(rows) / max(1, len(lengths)))) if shards else 1
    prefetch = shards.prefetch if shards else None
    order = TokenOrder(lengths, config.tokens_per_batch, config.seed, rows, per_window, prefetch)
    _require_room(config, order)
    return order


def _require_room(config: TrainConfig, order: "TokenOrder") -> None:
    """Raise TrainingError unless every micro-batch of every rank has a sample in all epochs."""
    budget, longest = config.tokens_per_batch, order.longest
    assert budget is not None
    layouts = [config.layout(workers) for workers in config.worker_counts]
    parts = max(layout.data * layout.gradient_accumulation for layout in layouts)
    fewest = min(order.min_samples(epoch) for epoch in range(1, config.epochs + 1)) if budget >= longest else 0
    if fewest < parts:
        raise TrainingError(
            f"train.tokens_per_batch is {budget}, and the longest sample has {longest} tokens: some batch has {fewest} "
            f"samples for {parts} micro-batches of all workers; give {2 * parts * longest} or more, or fewer workers"
        )


@dataclass
class TokenOrder(SampleOrder):
    """The global batches of samples with a length."""

    name: ClassVar[str] = "tokens-1"

    lengths: NDArray[np.int32]
    """Tokens of each sample with its padding, of shape (samples,)."""
    budget: int
    """Maximum tokens of a batch, with padding."""
    seed: int
    shard_rows: Sequence[int]
    """Samples of each shard. In memory there is one."""
    shards_per_window: int = 1
    prefetch: Callable[[Sequence[int]], None] | None = None
    """Have these shards downloaded in the background."""
    _epochs: dict[int, "_Epoch"] = field(default_factory=dict, init=False)
    _windows: dict[tuple[int, int], list[Indices]] = field(default_factory=dict, init=False)
    """Batches by epoch and window: of the one under way, and of the next, which is read ahead."""

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return int(self.lengths.max())

    def num_batches(self, epoch: int) -> int:
        """Return the number of batches of an epoch. Every sample is in one of them."""
        return int(self._epoch(epoch).starts[-1])

    def batch_size(self, epoch: int, number: int) -> int:
        """Return the number of samples of a batch."""
        return len(self.batch(epoch, number))

    def min_samples(self, epoch: int) -> int:
        """Return the number of samples of the smallest batch of an epoch."""
        return min(min(sizes) for sizes in self._epoch(epoch).sizes)

    def batch(self, epoch: int, number: int) -> Indices:
        """Return a global batch, as indices of shape (samples,)."""
        plan = self._epoch(epoch)
        window = int(np.searchsorted(plan.starts, number, side="right")) - 1
        if (epoch, window) not in self._windows:
            self._windows = {**_last(self._windows), (epoch, window): self._batches(epoch, window)}
            self._fetch_after(epoch, window)
        return self._windows[epoch, window][number - int(plan.starts[window])]

    @cached_property
    def _bounds(self) -> NDArray[np.int32]:
        """The length of each sample, rounded up: those of equal ones are shuffled together."""
        lengths = np.maximum(self.lengths, 1).astype(np.int64)
        step = 2 ** np.maximum(0, np.floor(np.log2(lengths)).astype(np.int64) - 3)
        bounds: NDArray[np.int32] = np.minimum(-(-lengths // step) * step, lengths.max()).astype(np.int32)
        return bounds

    @cached_property
    def _first_rows(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self.shard_rows)]).astype(np.int64)

    @cached_property
    def _classes(self) -> NDArray[np.int32]:
        """The different lengths, longest first."""
        return np.unique(self._bounds)[::-1]

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        """Samples of each length in each shard, of shape (shards, lengths)."""
        ascending = self._classes[::-1]
        counts = np.zeros((len(self.shard_rows), len(ascending)), np.int64)
        for shard, rows in enumerate(np.split(self._bounds, self._first_rows[1:-1])):
            counts[shard] = np.bincount(np.searchsorted(ascending, rows), minlength=len(ascending))
        return counts[:, ::-1]

    def _epoch(self, epoch: int) -> "_Epoch":
        if epoch not in self._epochs:
            shards = self._generator(_WINDOWS, epoch).permutation(len(self.shard_rows))
            windows = np.array_split(shards, max(1, len(shards) // self.shards_per_window))
            sizes = [batch_sizes(self._counts[window].sum(axis=0), self._classes, self.budget) for window in windows]
            starts = np.concatenate([[0], np.cumsum([len(part) for part in sizes])])
            # Keep the current epoch and the next, whose first shards are fetched ahead.
            self._epochs = {**_last(self._epochs), epoch: _Epoch(windows, sizes, starts)}
        return self._epochs[epoch]

    def _batches(self, epoch: int, window: int) -> list[Indices]:
        """Return the batches of a window, in their order."""
        plan, generator = self._epoch(epoch), self._generator(_ROWS, epoch, window)
        shards = plan.windows[window].tolist()
        if self.prefetch:
            self.prefetch(shards)
        rows = np.concatenate([np.arange(self._first_rows[shard], self._first_rows[shard + 1]) for shard in shards])
        shuffled = generator.permutation(rows)
        ordered = shuffled[np.argsort(-self._bounds[shuffled], kind="stable")]
        batches = np.split(ordered, np.cumsum(plan.sizes[window])[:-1])
        # Otherwise the longest would come first.
        return [batches[place] for place in generator.permutation(len(batches))]

    def _fetch_after(self, epoch: int, window: int) -> None:
        if self.prefetch:
            is_last = window + 1 == len(self._epoch(epoch).windows)
            following = self._epoch(epoch + 1).windows[0] if is_last else self._epoch(epoch).windows[window + 1]
            self.prefetch(following.tolist())


def _last(kept: dict[Key, Value]) -> dict[Key, Value]:
    """Return the newest entry."""
    return dict([*kept.items()][-1:])


@dataclass(frozen=True)
class _Epoch:
    """The layout of an epoch, which is known before its samples are shuffled."""

    windows: list[Indices]
    """The shards of each window."""
    sizes: list[list[int]]
    """Samples of each batch of each window, before the batches are shuffled."""
    starts: NDArray[np.int64]
    """Number of the first batch of each window, and the number of all batches."""


def batch_sizes(counts: NDArray[np.integer[Any]], lengths: NDArray[np.integer[Any]], budget: int) -> list[int]:
    """Return the number of samples of each batch, where samples are taken in order of length, longest first.

    A batch takes as many as fit into ``budget`` tokens if all were as long as its first. The last batch and the one
    before are made equal if the last would have less than half as many.

    Args:
        counts: samples of each length.
        lengths: the lengths, descending.
    """
    sizes: list[int] = []
    taken = 0  # samples of this length that fill up a batch of longer ones
    for count, length in zip(counts.tolist(), lengths.tolist(), strict=True):
        left = count - taken
        if left <= 0:
            taken = -left
            continue
        size = budget // length
        batches = -(-left // size)
        sizes += [size] * batches
        taken = batches * size - left
    sizes[-1] -= taken
    if len(sizes) > 1 and 2 * sizes[-1] < sizes[-2]:
        both = sizes[-2] + sizes[-1]
        sizes[-2:] = [both - both // 2, both // 2]
    return sizes
