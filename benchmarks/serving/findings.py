"""All that a run of the benchmark finds."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.machine import Conditions
from benchmarks.serving.race import Race
from benchmarks.serving.steady import Steady
from benchmarks.serving.sweep import Swept


@dataclass(frozen=True)
class Raced:
    """One case."""

    title: str
    peers: Collection[str]
    """Names of those that Rayloom is compared with."""

    peers_alone: Collection[str]
    """The peers that do not batch requests."""

    race: Race


@dataclass(frozen=True)
class Findings:
    """All that a run of the benchmark found."""

    races: Mapping[str, Raced]
    """The races by the case's name."""

    sweep: Swept | None
    """None: it was not asked for."""

    steady: Sequence[Steady]
    """Results of the cases at one rate."""

    versions: Sequence[str]
    """The versions of the peers."""

    num_rounds: int
    seconds: int
    """Seconds of load at each number of connections; twice as many at 64."""

    conditions: Conditions
