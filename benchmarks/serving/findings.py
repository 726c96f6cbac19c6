"""All that a run of the benchmark finds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.serving.race import Race
from benchmarks.serving.sweep import Swept


@dataclass(frozen=True)
class Raced:
    """One case."""

    title: str
    peers: Sequence[str]
    """Names of those that Rayloom is compared with."""

    race: Race


@dataclass(frozen=True)
class Findings:
    """All that a run of the benchmark found."""

    races: Mapping[str, Raced]
    """By the case's name."""

    sweep: Swept | None
    """None: it was not asked for."""

    versions: Sequence[str]
    """Of peers."""

    num_rounds: int
    seconds: float
    """Of load at each number of connections."""

    load_before: str
    load_after: str
    minutes: float
