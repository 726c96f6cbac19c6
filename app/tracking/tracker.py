"""The interface of a tracking server, and what is told to it about a run."""

import time
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
    """Where the run's folder lies, as ``folder``, and what the run came from."""
    parent: str | None = None
    """Id, in the tracker, of the search or lifecycle that it is a part of."""


@dataclass(frozen=True)
class Point:
    """The numbers of one record."""

    step: int
    values: Mapping[str, float]
    time_s: float = field(default_factory=time.time)
    """When it was read, in seconds since 1970. A point that is added again has the same time."""


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
    time_s: float = field(default_factory=time.time)
    """When it ended, in seconds since 1970."""


class Tracker(Protocol):
    """A tracking server. Every method may raise anything, and is called again then. One thread calls all of them."""

    name: str
    has_secret_address: bool
    """Whether no message may show an error, which may contain the server's address."""
    confirms_points: bool
    """Whether the server has the points once ``log`` returns. If not, it has them once ``close`` returns."""

    def open(self, facts: RunFacts, run_id: str | None) -> str:
        """Create a run and return its id, or go on with ``run_id``. A run that an earlier try created is found."""
        ...

    def describe(self, run_id: str, facts: RunFacts) -> None:
        """Add the run's parameters and lineage."""
        ...

    def log(self, run_id: str, points: Sequence[Point]) -> None:
        """Add points, in the order of their steps."""
        ...

    def close(self, run_id: str, end: RunEnd) -> None:
        """End the run, and add its files. If this fails, and ``log`` confirms no points, the run is opened anew."""
        ...
