"""What each data-parallel rank has of the samples: its partners in a batch, and its share of the validation split."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from app.data.prepared import Dataset, Indices
from app.training.data.samples import samples_of

BATCHES_PER_SORT = 32
"""Number of batches whose samples are sorted by length together. More pad less, fewer mix better."""


@dataclass(frozen=True)
class DataRank:
    """A worker's rank among the ``size`` data-parallel ranks."""

    rank: int
    size: int


def partners_of(batch: Indices, block: int) -> Indices:
    """Return the sample that each one of a global batch is mixed with, in the order of the batch.

    Pairs lie half a block of about ``block`` samples apart. They do not depend on the number of workers. With the block
    chosen to suit how ranks share a batch, a micro-batch nearly always holds the partners of its samples, too, so that
    they are read once.
    """
    blocks = np.array_split(batch, max(1, len(batch) // block))
    return np.concatenate([np.roll(samples, -(len(samples) // 2)) for samples in blocks])


def validation_share(
    split: Dataset, data_rank: DataRank, size: int, rows: Indices | None = None
) -> Iterator[tuple[Indices, int]]:
    """Yield this rank's batches of a split, or of some ascending rows of it. Each sample is on one rank.

    A batch has up to ``size`` samples of similar length and of one group. Every rank gets the same number of batches,
    because ranks under ZeRO 3 and in a pipeline compute together. A rank that has run out of samples gets empty
    batches. The sample that comes with each batch then stands in for it.
    """
    samples, groups = samples_of(split), split.groups
    rows = np.arange(len(samples)) if rows is None else rows
    for window in _windows(rows, data_rank.size * size * BATCHES_PER_SORT if split.shards else len(rows)):
        # The next window is downloaded while this one is read.
        samples.prefetch(rows[window.start : 2 * window.stop - window.start])
        found = rows[window]
        parts = [found] if groups is None else [found[groups[found] == group] for group in np.unique(groups[found])]
        for part in parts:
            ordered = part[np.argsort(samples.lengths_at(part), kind="stable")]
            share, largest_share = ordered[data_rank.rank :: data_rank.size], -(-len(part) // data_rank.size)
            yield from ((share[start : start + size], int(part[0])) for start in range(0, largest_share, size))


def _windows(rows: Indices, count: int) -> Iterator[slice]:
    return (slice(start, start + count) for start in range(0, len(rows), max(1, count)))
