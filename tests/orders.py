"""Orders of samples in memory, given by their lengths."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from app.data.prepared import Indices
from app.training.data.mixture import Mixture
from app.training.data.order import SampleOrder
from app.training.data.rules import Rules
from app.training.data.samples import InMemory

Period = tuple[tuple[int, int], Mixture]


def in_memory(
    lengths: Any, size: int | None, seed: int = 0, classes: Any = None, periods: Sequence[Period] = (), **rules: Any
) -> SampleOrder:
    return SampleOrder(InMemory(np.asarray(lengths), classes), Rules(size, **rules), seed, periods)


def batches_of(order: SampleOrder, *epochs: int) -> list[Indices]:
    return [order.batch(epoch, number) for epoch in epochs for number in range(order.num_batches(epoch))]
