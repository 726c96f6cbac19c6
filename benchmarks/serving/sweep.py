"""How batching is best set: Rayloom's endpoint over preferred size, largest size and delay."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from benchmarks.cluster import local_cluster
from benchmarks.markdown import one_line
from benchmarks.serving.contenders import Contender
from benchmarks.serving.load import Load, least_disturbed
from benchmarks.serving.models import ServedModel
from benchmarks.serving.rayloom import Rayloom, deploy
from benchmarks.serving.workloads import Workload
from benchmarks.serving.wrk import drive

CONNECTIONS = 64
SIZES = (1, 8, 32)
DELAYS_US = (0, 2000, 10_000)
PREFERRED = (None, 8, 16)


@dataclass(frozen=True)
class Setting:
    """Triton's three knobs."""

    max_size: int
    delay_us: int
    preferred: int | None

    @property
    def override(self) -> str:
        """For a recipe."""
        preferred = [] if self.preferred is None else [self.preferred]
        return (
            f"serve.batching={{max_batch_size: {self.max_size}, preferred_batch_sizes: {preferred}, "
            f"timeout_us: {self.delay_us}}}"
        )


SETTINGS = [
    Setting(size, delay, preferred)
    for preferred, size, delay in product(PREFERRED, SIZES, DELAYS_US)
    if (preferred is None or preferred < size) and (size > 1 or not delay)
]
"""Without those that come to the same: a batch of one waits for nothing, and no full one waits for more."""


@dataclass(frozen=True)
class Outcome:
    """The throughput of a setting under load, and the latency of a single client."""

    rate: float
    """Good answers a second, with 64 connections."""

    alone_ms: float
    """The median with one connection."""

    errors: int


@dataclass(frozen=True)
class Swept:
    """All settings."""

    outcomes: Mapping[Setting, Outcome]
    absent: Mapping[Setting, str]
    """Settings that were not served, and why, in a line."""

    @property
    def best(self) -> Setting:
        """The one that answered most."""
        return max(self.outcomes, key=lambda setting: self.outcomes[setting].rate)


def sweep(model: ServedModel, workload: Workload, seconds: int, settings: Sequence[Setting] = SETTINGS) -> Swept:
    """Deploy a model with each setting in turn, on one cluster; check its answers and load it.

    Raises:
        RuntimeError: the cluster does not start.
    """
    outcomes, absent = {}, {}
    with local_cluster() as cluster:
        for setting in settings:
            contender = Rayloom(setting.override, model, (setting.override,))
            try:
                url = deploy(cluster, model, setting.override)["http"]
                outcomes[setting] = _outcome(url, contender, workload, seconds)
                print(f"{setting.override}: {outcomes[setting]}", flush=True)
            except RuntimeError as error:
                absent[setting] = one_line(str(error))
                print(f"{setting.override}: left out: {error}", flush=True)
    return Swept(outcomes, absent)


def _outcome(url: str, contender: Contender, workload: Workload, seconds: int) -> Outcome:
    requests = workload.requests(contender.wire)

    def load(connections: int, seconds: int) -> Load:
        workload.check(url, contender.wire, contender.tolerance)  # also lets it answer what wrk left behind
        return drive(url, requests, connections, seconds)

    alone = least_disturbed(partial(load, 1, seconds))
    many = least_disturbed(partial(load, CONNECTIONS, 2 * seconds))
    workload.check(url, contender.wire, contender.tolerance)
    return Outcome(many.rate, alone.p50_ms, alone.errors + many.errors)
