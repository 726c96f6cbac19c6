"""The interface of a tracking server, and what is told to it about a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

Status = Literal["succeeded", "stopped", "pruned", "failed", "interrupted"]


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run when it starts."""

    name: str
    """The run's id; of a trial, ``RUN_ID/0003``."""
    job: str
    recipe: str
    parameters: Mapping[str, str]
    """The keys of the resolved recipe with their values; of a trial, those that were drawn for it."""
    lineage: Mapping[str, str]
    """Where the run's folder lies, and what the run came from."""
    parent: str | None = None
    """Id, in the tracker, of the search or lifecycle that it is a part of."""


@dataclass(frozen=True)
class Point:
    """The numbers of one record."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class PublishedVersion:
    """A version that a run has published."""

    name: str
    number: int
    location: str
    """Its folder in storage."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended, and what it left."""

    status: Status
    metrics: Mapping[str, float] = field(default_factory=dict)
    lineage: Mapping[str, str] = field(default_factory=dict)
    """What the run made: the locations of its artifacts."""
    files: Sequence[Path] = ()
    """Small files of the run's folder."""
    version: PublishedVersion | None = None


class Tracker(Protocol):
    """A tracking server. Every method may raise anything, and is called again then. One thread calls all of them."""

    name: str

    def open(self, facts: RunFacts, run_id: str | None) -> str:
        """Create a run and return its id, or go on with ``run_id`` if the server knows it."""
        ...

    def log(self, run_id: str, points: Sequence[Point]) -> None:
        """Add points, in the order of their steps."""
        ...

    def close(self, run_id: str, end: RunEnd) -> None:
        """End the run, and add its files."""
        ...
