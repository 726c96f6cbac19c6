"""Easy samples before hard ones, each once an epoch, in batches of one size.

A group of batches is drawn by chance from the samples that are easy enough for now, and not taken yet in this epoch.
When too few of them are left, the next easiest are added. So an epoch is what it is without a curriculum: every sample
once, except those of an incomplete last batch.
"""

import heapq
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from app.config import CurriculumConfig
from app.training.data.batches import Indices, MemoryOrder, train_batches

_BATCHES_PER_GROUP = 8
"""Batches that are drawn together, and sorted by length. More pad less, and become harder in larger leaps."""


@dataclass
class CurriculumOrder(MemoryOrder):
    """The order of samples in memory with a curriculum."""

    name: ClassVar[str] = "curriculum-1"

    difficulty: NDArray[np.float32] = field(kw_only=True)
    """How hard each sample is, of shape (samples,). Of equal ones, the earlier counts as easier."""
    config: CurriculumConfig = field(kw_only=True)

    def make_batches(self, epoch: int) -> Indices:
        """Return the batches of an epoch, of shape (batches, size). After the curriculum they are ``train_batches``."""
        if self.config.competence(epoch - 1) >= 1.0:
            return train_batches(self.lengths, self.size, self.seed, epoch)
        generator = self._generator(epoch)
        lengths, groups = np.asarray(self.lengths), []
        for group in self._groups(epoch, generator.permutation(len(lengths))):
            by_length = group[np.argsort(lengths[group], kind="stable")]
            groups.append(generator.permutation(by_length.reshape(-1, self.size)))
        return np.concatenate(groups)

    def _groups(self, epoch: int, lots: Indices) -> list[Indices]:
        """Return the samples of each group of batches. Among those that may be taken, low ``lots`` come first."""
        total, taken, admitted = len(lots), 0, 0
        by_difficulty = np.argsort(self.difficulty, kind="stable")
        waiting: list[tuple[int, int]] = []
        groups = []
        for first in range(0, total // self.size, _BATCHES_PER_GROUP):
            count = min(_BATCHES_PER_GROUP, total // self.size - first) * self.size
            share = self.config.competence(epoch - 1 + taken / total)
            room = max(int(share * total), taken + count)
            for sample in by_difficulty[admitted:room].tolist():
                heapq.heappush(waiting, (int(lots[sample]), sample))
            admitted = max(admitted, room)
            groups.append(np.array([heapq.heappop(waiting)[1] for _ in range(count)], np.int64))
            taken += count
        return groups
