"""What was to be reached, beside what was."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from benchmarks.markdown import Goal, verdict
from benchmarks.serving.cases import (
    BATCHING_OFF,
    CHOSEN,
    CHOSEN_LOOP,
    IN_JSON,
    OVER_GRPC,
    RAYLOOM,
    SAME_FILE_LOOP,
    TRITON_IN_JSON,
)
from benchmarks.serving.findings import Findings, Raced
from benchmarks.serving.race import Result
from benchmarks.serving.servers import EAGER, TRITON_GRPC
from benchmarks.serving.steady import Steady
from benchmarks.spread import Spread

FASTER_THAN_PEERS = {16: 1.7, 64: 1.6}
"""Times the rate of the best peer, by the number of connections."""
P99_OF_PEERS = 0.8
FASTER_IN_JSON = 1.3
FASTER_OVER_GRPC = 1.2
CPU_US = 100
OF_THE_LOOP = 0.95
NO_SLOWER = 1.03
"""Times the latency: what two runs of the same differ by."""

CHOSEN_FASTER_THAN_PEERS = 2.5
LATENCY_OF_EAGER = 0.2
_ONE, _SOME, _MANY = 1, 16, 64


def goals(found: Findings) -> list[Goal]:
    """Every goal of the races that were run."""
    rows = {"cnn": _cnn, "grpc": _grpc, "encoder": _encoder, "texts": _texts}
    raced = [goal for name, raced in found.races.items() for goal in rows[name](raced)]
    return [*raced, *(goal for steady in found.steady for goal in _steady(steady))]


def _cnn(raced: Raced) -> Iterator[Goal]:
    what = f"{raced.title}: {RAYLOOM} / the best peer"
    for connections, faster in FASTER_THAN_PEERS.items():
        best, at = raced.race.fastest(raced.peers, connections), _at(connections)
        rates = _ratio(raced, Result.rate, RAYLOOM, best, connections)
        p99s = _ratio(raced, Result.p99_ms, RAYLOOM, best, connections)
        yield _judged(f"{what}, rows a second, {at}", rates, "≥", faster)
        yield _judged(f"{what}, p99, {at}", p99s, "≤", P99_OF_PEERS)
        in_json = _ratio(raced, Result.rate, IN_JSON, TRITON_IN_JSON, connections)
        yield _judged(f"{raced.title}: {IN_JSON} / {TRITON_IN_JSON}, rows a second, {at}", in_json, "≥", FASTER_IN_JSON)
    yield from _cnn_alone(raced)
    yield _cpu(raced)


def _cnn_alone(raced: Raced) -> Iterator[Goal]:
    """Compare with the best peer without batching, which gains nothing with one connection."""
    what = f"{raced.title}: {RAYLOOM} / the best peer without batching"
    best = raced.race.soonest(raced.peers_alone, _ONE)
    rates = _ratio(raced, Result.rate, RAYLOOM, best, _ONE)
    p50s = _ratio(raced, Result.p50_ms, RAYLOOM, best, _ONE)
    yield _judged(f"{what}, rows a second, {_at(_ONE)}", rates, "≥", 1.0)
    yield _judged(f"{what}, p50, {_at(_ONE)}", p50s, "≤", 1.0)


def _cpu(raced: Raced) -> Goal:
    what, goal = f"{raced.title}: {RAYLOOM}, CPU of an answer, {_at(_MANY)}", f"≤ {CPU_US} µs"
    if (missing := _missing(raced, RAYLOOM)) is not None:
        return Goal(what, goal, missing, "open")
    spent = raced.race.results[RAYLOOM].cpu_us(_MANY)
    return Goal(what, goal, f"{spent.median:.0f} µs", verdict(spent.median <= CPU_US))


def _grpc(raced: Raced) -> Iterator[Goal]:
    for connections in (_SOME, _MANY):
        rates = _ratio(raced, Result.rate, OVER_GRPC, raced.race.fastest(raced.peers, connections), connections)
        what = f"{raced.title}: {OVER_GRPC} / {TRITON_GRPC.name}, rows a second, {_at(connections)}"
        yield _judged(what, rates, "≥", FASTER_OVER_GRPC)


def _encoder(raced: Raced) -> Iterator[Goal]:
    race, what = raced.race, f"{raced.title}: {RAYLOOM}"
    loop = race.loops[SAME_FILE_LOOP]
    share = _missing(raced, RAYLOOM) or Compared(race.results[RAYLOOM].rate(_MANY).over(loop), SAME_FILE_LOOP)
    yield _judged(f"{what} / the bare engine loop, rows a second, {_at(_MANY)}", share, "≥", OF_THE_LOOP)

    alone = {"itself": BATCHING_OFF, "the best peer": race.soonest(raced.peers_alone, _ONE)}
    for named, other in alone.items():
        p50s = _ratio(raced, Result.p50_ms, RAYLOOM, other, _ONE)
        yield _judged(f"{what} / {named} without batching, p50, {_at(_ONE)}", p50s, "≤", NO_SLOWER)

    rates = _ratio(raced, Result.rate, CHOSEN, race.fastest(raced.peers, _MANY), _MANY)
    same = _ratio(raced, Result.rate, RAYLOOM, race.fastest(raced.peers, _MANY), _MANY)
    yield _judged(f"{what} / the best peer, rows a second, {_at(_MANY)}", same, "≥", 1.0)
    chosen = f"{raced.title}: {CHOSEN} / the best peer, rows a second, {_at(_MANY)}"
    yield _judged(chosen, rates, "≥", CHOSEN_FASTER_THAN_PEERS)

    for connections in (_SOME, _MANY):
        rates = _ratio(raced, Result.rate, RAYLOOM, BATCHING_OFF, connections)
        yield Goal(f"{what} / itself without batching, rows a second, {_at(connections)}", "shown", str(rates), "")


def _texts(raced: Raced) -> Iterator[Goal]:
    race, loop = raced.race, raced.race.loops[CHOSEN_LOOP]
    share = _missing(raced, CHOSEN) or Compared(race.results[CHOSEN].rate(_MANY).over(loop), CHOSEN_LOOP)
    what = f"{raced.title}: {CHOSEN} / the bare engine loop, rows a second, {_at(_MANY)}"
    yield _judged(what, share, "≥", OF_THE_LOOP)
    what = f"{raced.title}: {CHOSEN} / {EAGER.name}"
    for connections in (_SOME, _MANY):
        rates = _ratio(raced, Result.rate, CHOSEN, EAGER.name, connections)
        p50s = _ratio(raced, Result.p50_ms, CHOSEN, EAGER.name, connections)
        yield Goal(f"{what}, rows a second, {_at(connections)}", "shown", str(rates), "")
        yield _judged(f"{what}, p50, {_at(connections)}", p50s, "≤", LATENCY_OF_EAGER)
    if _missing(raced, EAGER.name) is None:
        alone = Compared(loop.over(race.results[EAGER.name].rate(_MANY)), EAGER.name)
        yield Goal(f"{raced.title}: {CHOSEN_LOOP} / {EAGER.name}, rows a second", "shown", str(alone), "")


def _steady(steady: Steady) -> Iterator[Goal]:
    what = f"{steady.title} at {steady.rate:.0f} requests a second: {steady.own} / {steady.baseline}"
    limits = (
        {Steady.p50_ms: LATENCY_OF_EAGER} if steady.baseline == EAGER.name else {Steady.p50_ms: 1.0, Steady.p99_ms: 1.0}
    )
    for measure, limit in limits.items():
        compared: Compared | str
        if steady.absent:
            compared = "; ".join(steady.absent.values())
        elif errors := steady.errors(steady.own):
            compared = f"{errors} requests got no good answer"
        else:
            ratios = measure(steady, steady.own).over(measure(steady, steady.baseline))
            compared = Compared(ratios, steady.baseline)
        yield _judged(f"{what}, {measure.__name__.removesuffix('_ms')}", compared, "≤", limit)


@dataclass(frozen=True)
class Compared:
    """The ratio of a measurement to another contender's, and the name of that one."""

    ratio: Spread
    other: str

    def __str__(self) -> str:
        return f"{self.ratio}, {self.other}"


def _ratio(
    raced: Raced, measure: Callable[[Result, int], Spread], name: str, other: str | None, connections: int
) -> Compared | str:
    """The ratios of a number of two contenders, or why there are none."""
    if other is None:
        return "no peer ran"
    results = raced.race.results
    if (missing := _missing(raced, name, other)) is not None:
        return missing
    return Compared(measure(results[name], connections).over(measure(results[other], connections)), other)


def _missing(raced: Raced, *names: str) -> str | None:
    """Why one of them was not measured; None if all were."""
    race = raced.race
    return next((race.absent.get(name, "did not take part") for name in names if name not in race.results), None)


def _judged(what: str, compared: Compared | str, sign: Literal["≥", "≤"], limit: float) -> Goal:
    goal = f"{sign} {limit:g}"
    if isinstance(compared, str):
        return Goal(what, goal, compared, "open")
    reached = compared.ratio.median
    return Goal(what, goal, str(compared), verdict(reached >= limit if sign == "≥" else reached <= limit))


def _at(connections: int) -> str:
    return f"{connections} connection{'s' * (connections > 1)}"
