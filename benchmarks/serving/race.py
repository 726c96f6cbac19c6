"""Servers in turn: one runs at a time, so that none takes a core from another."""

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.markdown import one_line
from benchmarks.rounds import turns
from benchmarks.serving import h2load, wrk
from benchmarks.serving.contenders import Contender
from benchmarks.serving.load import Load, least_disturbed
from benchmarks.serving.wire import Request, Scheme
from benchmarks.serving.workloads import Workload
from benchmarks.spread import Spread

CONNECTIONS = (1, 16, 64)
_WARM_UP_S = 1
_DRIVERS: Mapping[Scheme, Callable[[str, Sequence[Request], int, int], Load]] = {
    "http": wrk.drive,
    "grpc": h2load.drive,
}

Loads = Mapping[int, Load]
"""By the number of connections."""


@dataclass(frozen=True)
class Result:
    """One contender's rounds."""

    setting: str
    sent: str
    rounds: Sequence[Loads]

    def rate(self, connections: int) -> Spread:
        """Good answers a second."""
        return Spread(tuple(round_[connections].rate for round_ in self.rounds))

    def p50_ms(self, connections: int) -> Spread:
        """Return the median of a request's latency, for each round."""
        return Spread(tuple(round_[connections].p50_ms for round_ in self.rounds))

    def p99_ms(self, connections: int) -> Spread:
        """Return the 99th percentile of a request's latency, for each round."""
        return Spread(tuple(round_[connections].p99_ms for round_ in self.rounds))

    def cpu_us(self, connections: int) -> Spread:
        """CPU time of the whole machine for each answer, including the load generator's."""
        return Spread(tuple(loads[connections].cpu_us for loads in self.rounds))

    def errors(self, connections: int) -> int:
        """Return the number of errors in all rounds."""
        return sum(round_[connections].errors for round_ in self.rounds)

    def generator_busy(self, connections: int) -> float:
        """The share of its core that the load generator took, in the worst round."""
        return max(round_[connections].generator_busy for round_ in self.rounds)

    def stolen(self, connections: int) -> float:
        """Return the share of a core that other machines took, in the worst round."""
        return max(round_[connections].stolen for round_ in self.rounds)


@dataclass(frozen=True)
class Race:
    """All rounds of one workload."""

    results: Mapping[str, Result]
    """The results by the contender's name."""

    loops: Mapping[str, Spread]
    """Rows a second of bare engines, by name."""

    absent: Mapping[str, str]
    """Contenders that did not run, and why, in a line."""

    def fastest(self, names: Collection[str], connections: int) -> str | None:
        """Return the one with the most good answers; None if none of them ran."""
        ran = self.results.keys() & names
        return max(ran, key=lambda name: self.results[name].rate(connections).median, default=None)

    def soonest(self, names: Collection[str], connections: int) -> str | None:
        """Return the one with the lowest median latency; None if none of them ran."""
        ran = self.results.keys() & names
        return min(ran, key=lambda name: self.results[name].p50_ms(connections).median, default=None)


def race(
    contenders: Sequence[Contender],
    workload: Workload,
    loops: Mapping[str, Callable[[], float]],
    num_rounds: int,
    seconds: int,
) -> Race:
    """Time every contender ``num_rounds`` times; each round begins with the bare engines, then with another contender.

    Args:
        seconds: of load at each number of connections, twice as many at the largest.
    """
    by_name = {contender.name: contender for contender in contenders}
    done: dict[str, list[Loads]] = {name: [] for name in by_name}
    rates: dict[str, list[float]] = {name: [] for name in loops}
    absent: dict[str, str] = {}
    for number, order in enumerate(turns(list(by_name), num_rounds), start=1):
        for name, measure in loops.items():
            rates[name].append(measure())
            print(f"round {number}: {name}: {rates[name][-1]:.0f} rows/s", flush=True)
        for name in order:
            if name in absent:
                continue
            try:
                done[name].append(take_turn(by_name[name], workload, seconds))
                print(f"round {number}: {name}: {_line(done[name][-1])}", flush=True)
            except RuntimeError as error:
                absent[name] = one_line(str(error))
                print(f"round {number}: {name}: left out: {error}", flush=True)
    return Race(
        {
            name: Result(contender.setting, str(contender.wire), done[name])
            for name, contender in by_name.items()
            if name not in absent
        },
        {name: Spread(tuple(values)) for name, values in rates.items()},
        absent,
    )


def take_turn(contender: Contender, workload: Workload, seconds: int) -> Loads:
    """Start it, warm it up and load it. Raises RuntimeError: it does not run, or answers wrong."""
    requests, drive = workload.requests(contender.wire), _DRIVERS[contender.wire.scheme]
    with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as folder, contender.serve(Path(folder)) as url:

        def check() -> None:
            """Once it has answered all this, it has also answered what the load left behind when its time was over."""
            workload.check(url, contender.wire, contender.tolerance)

        def load(connections: int) -> Load:
            check()
            # Batches that are not finished at the end do not count, and the more connections, the larger they are.
            longer = 2 if connections == max(CONNECTIONS) else 1
            return drive(url, requests, connections, longer * seconds)

        check()
        drive(url, requests, max(CONNECTIONS), _WARM_UP_S)
        return {connections: least_disturbed(partial(load, connections)) for connections in CONNECTIONS}


def _line(loads: Loads) -> str:
    return "; ".join(f"{connections} connections {_figures(load)}" for connections, load in loads.items())


def _figures(load: Load) -> str:
    errors = f", {load.errors} errors" if load.errors else ""
    spent = f"{load.cpu_us:.0f} µs of CPU, generator {load.generator_busy:.0%} busy, {load.stolen:.0%} stolen"
    return f"{load.rate:.0f}/s, p50 {load.p50_ms:.2f} ms, p99 {load.p99_ms:.2f} ms{errors}, {spent}"
