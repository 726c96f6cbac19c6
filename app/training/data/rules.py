"""The rules by which the rows of a window become batches. They arrange places in the window, and compose."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.config import CurriculumConfig
from app.data.prepared import Indices
from app.training.data.ranks import BATCHES_PER_SORT
from app.training.data.samples import Samples

Numbers = NDArray[np.integer[Any]]
Batches = Sequence[Indices] | Indices
_CURRICULUM_BATCHES = 8
"""Batches that are drawn together, and sorted by length. More pad less, and become harder in larger leaps."""


@dataclass(frozen=True)
class Curriculum:
    """How hard each sample is, of shape (samples,), and when it may come. Of equal ones, the order is by chance."""

    difficulty: NDArray[np.float32]
    config: CurriculumConfig


@dataclass(frozen=True)
class Window:
    """A window, or a stream's part of it.

    Attributes:
        samples: of all windows.
        rows: the window's rows, in the order of their shards.
        places: places in ``rows``, shuffled.
        streams: parts that batches are made of. These rows make one of each.
        sizes: samples of each batch of each group, where they are counted.
        epochs_done: how many epochs are done where the window begins, and where it ends.
        chance: what rules draw from.
        shuffle: what the batches are shuffled by.
    """

    samples: Samples
    rows: Indices
    places: Indices
    streams: int
    sizes: list[list[int]]
    epochs_done: tuple[float, float]
    chance: np.random.Generator
    shuffle: np.random.Generator

    @cached_property
    def lengths(self) -> Numbers | None:
        """The length of each row; None if all are equal."""
        return None if self.samples.has_one_length else self.samples.lengths_at(self.rows)

    @cached_property
    def classes(self) -> Numbers:
        """The class of each row."""
        return self.samples.classes_at(self.rows)


@dataclass(frozen=True)
class Rules:
    """What a recipe says about batches.

    Attributes:
        size: samples of a batch; None with ``budget``.
        budget: maximum tokens of a batch, with padding.
        padded_lengths: tokens of each sample with its padding, of shape (samples,), for ``budget``.
        groups: the group of each sample, of shape (samples,), if a batch may have samples of one group only.
        is_balanced: whether all classes come equally often.
        curriculum: None: samples of any difficulty come at any time.
    """

    size: int | None
    budget: int | None = None
    padded_lengths: NDArray[np.int32] | None = None
    groups: NDArray[np.str_] | None = None
    is_balanced: bool = False
    curriculum: Curriculum | None = None

    @cached_property
    def kinds(self) -> "Kinds | None":
        """The kinds of samples, if the number of batches depends on how many there are of each."""
        if self.groups is None and self.padded_lengths is None:
            return None
        return Kinds(self)

    @property
    def unit(self) -> int:
        """What the rows of a window are a multiple of: a batch, unless batches are counted."""
        return 1 if self.kinds or self.size is None else self.size

    def arrange(self, window: Window) -> Batches:
        """Return the rows of a window in batches."""
        parts = [self._batches(window, places, sizes) for places, sizes in self._groups(window)]
        if len(parts) == 1 and isinstance(parts[0], np.ndarray):
            return window.rows[parts[0]]
        batches = [window.rows[batch] for part in parts for batch in part]
        return [batches[number] for number in evenly([len(part) for part in parts])]

    def _groups(self, window: Window) -> Sequence[tuple[Indices, list[int]]]:
        """Return the places of each group that has batches, with their sizes."""
        if self.kinds is None:
            return [(window.places, [])]
        if len(window.sizes) == 1:
            return [(window.places, window.sizes[0])]
        group_of = self.kinds.groups_at(window.rows)[window.places]
        return [(window.places[group_of == group], sizes) for group, sizes in enumerate(window.sizes) if sizes]

    def _batches(self, window: Window, places: Indices, sizes: list[int]) -> Batches:
        """Return the places of a group in batches."""
        if self.budget is not None:
            assert self.kinds
            return cut_into(places, self.kinds.of_row[window.rows[places]], sizes, window.shuffle)
        assert self.size
        size = self.size // window.streams
        if self.is_balanced:
            places = balanced(places, window.classes[places], window.chance)
        places = places[: len(places) // size * size]
        start, stop = window.epochs_done
        curriculum = self.curriculum if self.curriculum and self.curriculum.config.competence(start) < 1.0 else None
        if curriculum:
            places = by_competence(
                places,
                curriculum.difficulty[window.rows[places]],
                size,
                lambda done: curriculum.config.competence(start + done * (stop - start)),
            )
        lengths = None if window.lengths is None else window.lengths[places]
        return cut(places, lengths, size, window.shuffle, curriculum is not None)


class Kinds:
    """Samples by group and length, of which a window's batches are counted before they are read.

    Kinds are numbered group by group, longest first.
    """

    def __init__(self, rules: Rules) -> None:
        self._size, self._budget = rules.size, rules.budget
        groups, lengths = rules.groups, rules.padded_lengths
        names, group = ([""], 0) if groups is None else np.unique(groups, return_inverse=True)
        bounds = np.zeros(1, np.int64) if lengths is None else rounded_up(lengths)
        self.longest = int(bounds.max())
        """Tokens of the longest sample."""
        span = self.longest + 1
        numbers = group * span + self.longest - bounds
        is_found = np.bincount(numbers) > 0
        found = np.flatnonzero(is_found)
        # Numbers of 16 bits are sorted several times as fast.
        kinds = (np.cumsum(is_found) - 1).astype(np.min_scalar_type(len(found)))
        self.of_row: Numbers = kinds[numbers]
        """The kind of each sample."""
        self.names: list[str] = list(names)
        """The groups."""
        self._groups, self._lengths = found // span, self.longest - found % span
        self._bounds = np.searchsorted(self._groups, np.arange(len(names) + 1))

    def groups_at(self, rows: Indices) -> Indices:
        """Return the number of the group of each row."""
        groups: Indices = self._groups[self.of_row[rows]]
        return groups

    def sizes(self, rows: Indices | None = None) -> list[list[int]]:
        """Return the samples of each batch of each group that these rows give; of all rows without any."""
        of_row = self.of_row if rows is None else self.of_row[rows]
        counts = np.bincount(of_row, minlength=len(self._groups))
        return [
            self._group_sizes(counts[here], self._lengths[here]) for here in map(slice, self._bounds, self._bounds[1:])
        ]

    def _group_sizes(self, counts: Indices, lengths: Indices) -> list[int]:
        if self._budget is not None:
            return batch_sizes(counts, lengths, self._budget)
        assert self._size is not None
        return [self._size] * (int(counts.sum()) // self._size)


def rounded_up(lengths: Numbers) -> Indices:
    """Return lengths rounded up to eight steps an octave, but to no more than the greatest.

    Those of equal ones are shuffled together, so that a batch has other samples in each epoch.
    """
    lengths = np.maximum(lengths, 1).astype(np.int64)
    step = 2 ** np.maximum(0, np.floor(np.log2(lengths)).astype(np.int64) - 3)
    bounds: Indices = np.minimum(-(-lengths // step) * step, lengths.max())
    return bounds


def batch_sizes(counts: Numbers, lengths: Numbers, budget: int) -> list[int]:
    """Return the number of samples of each batch, where samples are taken in order of length, longest first.

    A batch takes as many as fit into ``budget`` tokens if all were as long as its first. The last batch and the one
    before are made equal if the last would have less than half as many.

    Args:
        counts: samples of each length.
        lengths: the lengths, descending.
        budget: maximum tokens of a batch.
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
    if sizes:
        sizes[-1] -= taken
    if len(sizes) > 1 and 2 * sizes[-1] < sizes[-2]:
        both = sizes[-2] + sizes[-1]
        sizes[-2:] = [both - both // 2, both // 2]
    return sizes


def evenly(counts: Sequence[int]) -> Indices:
    """Return the order in which several parts, laid end to end, are read if each is spread evenly over the whole."""
    times = np.concatenate([(np.arange(count) + 0.5) / max(1, count) for count in counts])
    return np.argsort(times, kind="stable")


def balanced(places: Indices, classes: Numbers, generator: np.random.Generator) -> Indices:
    """Return as many places, shuffled again, with the same number of each class of ``classes``, give or take one.

    The places of a class are repeated as whole permutations, so that each comes about equally often.
    """
    found = generator.permutation(np.unique(classes))
    shares = [len(part) for part in np.array_split(classes, len(found))]
    chosen = []
    for label, share in zip(found, shares, strict=True):
        members = places[classes == label]
        further = -(-share // len(members)) - 1
        chosen.append(np.concatenate([members, *(generator.permutation(members) for _ in range(further))])[:share])
    return generator.permutation(np.concatenate(chosen))


def by_competence(
    places: Indices, difficulty: NDArray[np.float32], size: int, competence: Callable[[float], float]
) -> Indices:
    """Return places in the order in which they are easy enough.

    Some batches are drawn together from the places that may come by then. Among these, the first ones of ``places`` are
    taken. When too few are left, the next easiest are added. So every place comes once.

    Args:
        places: in an order by chance; as many as fill batches of ``size``.
        difficulty: of each place.
        size: samples of a batch.
        competence: returns the share of the places that may come, by how much of them has come.
    """
    total, taken, admitted = len(places), 0, 0
    easiest = np.argsort(difficulty, kind="stable")
    waiting: list[int] = []
    chosen: list[int] = []
    while taken < total:
        count = min(_CURRICULUM_BATCHES * size, total - taken)
        room = max(int(competence(taken / total) * total), taken + count, admitted)
        for lot in easiest[admitted:room].tolist():
            heapq.heappush(waiting, lot)
        chosen += [heapq.heappop(waiting) for _ in range(count)]
        admitted, taken = room, taken + count
    return places[chosen]


def cut(
    places: Indices, lengths: Numbers | None, size: int, generator: np.random.Generator, is_curriculum: bool
) -> Indices:
    """Return places in batches, of shape (batches, size), sorted by length within groups of batches.

    ``lengths`` has the length of each place; None: all are equal. The batches of a group are shuffled, because sorting
    has put the short ones first.
    """
    batches = len(places) // size
    group = np.arange(batches) // (_CURRICULUM_BATCHES if is_curriculum else BATCHES_PER_SORT)
    if lengths is not None:
        keys = np.repeat(group * (int(lengths.max(initial=0)) + 1), size) + lengths
        places = places[np.argsort(keys, kind="stable")]
    return places.reshape(batches, size)[np.lexsort((generator.random(batches), group))]


def cut_into(places: Indices, kinds: Numbers, sizes: Sequence[int], generator: np.random.Generator) -> list[Indices]:
    """Return places in batches of these sizes, longest first in ``kinds``, the kind of each place; then shuffled."""
    ordered = places[np.argsort(kinds, kind="stable")]
    batches = np.split(ordered, np.cumsum(sizes)[:-1])
    return [batches[number] for number in generator.permutation(len(batches))]
