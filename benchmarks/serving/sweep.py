"""How batching is best set: Rayloom's endpoint over preferred size, largest size and delay."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.serving.models import ServedModel
from benchmarks.serving.rayloom import Cluster, Rayloom
from benchmarks.serving.workloads import Workload
from benchmarks.serving.wrk import drive

CONNECTIONS = 64
SIZES = (1, 8, 16, 32)
DELAYS_US = (0, 1000, 2000, 5000)
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
    if preferred is None or preferred <= size
]


@dataclass(frozen=True)
class Outcome:
    """What a setting gives when many ask, and what it costs when one asks alone."""

    rate: float
    """Good answers a second, with 64 connections."""

    p99_ms: float
    """With as many."""

    alone_ms: float
    """The median with one connection."""

    errors: int


def sweep(
    model: ServedModel, workload: Workload, seconds: float, settings: Sequence[Setting] = SETTINGS
) -> dict[Setting, Outcome]:
    """Deploy a model with each setting in turn, on one cluster; check its answers and load it. Raises RuntimeError."""
    found = {}
    rayloom = Rayloom("", model)
    requests = workload.requests(rayloom.wire)
    with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as folder:
        cluster = Cluster(Path(folder))
        with cluster.up():
            for setting in settings:
                url = cluster.deploy(model, setting.override)
                workload.check(url, rayloom.wire, rayloom.tolerance)
                alone = drive(url, requests, 1, seconds)
                many = drive(url, requests, CONNECTIONS, seconds)
                found[setting] = Outcome(many.rate, many.p99_ms, alone.p50_ms, alone.errors + many.errors)
                print(f"{setting}: {found[setting]}", flush=True)
    return found
