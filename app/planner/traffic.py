"""Bytes that a rank's collectives carry in one optimizer step, by kind and group."""

from dataclasses import dataclass
from typing import Literal

CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "send"]
Group = Literal["tensor", "data", "pipeline", "tied", "world"]
"""tied: the first and the last stage, which share an embedding. world: all ranks."""


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind in one group, in one step of one rank."""

    kind: CollectiveKind
    group: Group
    ranks: int
    """Ranks of the group."""
    bytes: float
    """Bytes of all of them together, of the whole tensor: an all-gather's output, a reduce-scatter's input."""
    count: float
    """How many there are."""
