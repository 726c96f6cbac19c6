"""What was to be reached, beside what was."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from benchmarks.markdown import Goal, verdict
from benchmarks.serving.cases import BATCHING_OFF, CHOSEN, RAYLOOM, SAME_FILE_LOOP
from benchmarks.serving.findings import Findings, Raced
from benchmarks.serving.race import Result
from benchmarks.serving.servers import EAGER
from benchmarks.serving.steady import Steady
from benchmarks.spread import Spread

FASTER_THAN_PEERS = 1.5
OF_THE_LOOP = 0.95
NO_SLOWER = 1.03
"""Times the latency: what two runs of the same differ by."""

CHOSEN_FASTER_THAN_PEERS = 2.5
FASTER_THAN_EAGER, LATENCY_OF_EAGER = 7.0, 0.2
_ONE, _SOME, _MANY = 1, 16, 64


def goals(found: Findings) -> list[Goal]:
    """Every goal of the races that were run."""
    rows = {"cnn": _cnn, "encoder": _encoder, "texts": _texts}
    raced = [goal for name, raced in found.races.items() for goal in rows[name](raced)]
    return [*raced, _steady(found.steady)] if found.steady else raced


def _cnn(raced: Raced) -> Iterator[Goal]:
    what = f"{raced.title}: {RAYLOOM} / the best peer"
    for connections in (_SOME, _MANY):
        best, at = raced.race.fastest(raced.peers, connections), _at(connections)
        rates = _ratio(raced, Result.rate, RAYLOOM, best, connections)
        p99s = _ratio(raced, Result.p99_ms, RAYLOOM, best, connections)
        yield _judged(f"{what}, rows a second, {at}", rates, "≥", FASTER_THAN_PEERS)
        yield _judged(f"{what}, p99, {at}", p99s, "≤", 1.0)


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
    chosen = f"{raced.title}: {CHOSEN} / the best peer, rows a second, {_at(_MANY)}"
    yield _judged(chosen, rates, "≥", CHOSEN_FASTER_THAN_PEERS)

    for connections in (_SOME, _MANY):
        rates = _ratio(raced, Result.rate, RAYLOOM, BATCHING_OFF, connections)
        yield Goal(f"{what} / itself without batching, rows a second, {_at(connections)}", "shown", str(rates), "")


def _texts(raced: Raced) -> Iterator[Goal]:
    what = f"{raced.title}: {CHOSEN} / {EAGER.name}"
    for connections in (_SOME, _MANY):
        rates = _ratio(raced, Result.rate, CHOSEN, EAGER.name, connections)
        p50s = _ratio(raced, Result.p50_ms, CHOSEN, EAGER.name, connections)
        yield _judged(f"{what}, rows a second, {_at(connections)}", rates, "≥", FASTER_THAN_EAGER)
        yield _judged(f"{what}, p50, {_at(connections)}", p50s, "≤", LATENCY_OF_EAGER)


def _steady(steady: Steady) -> Goal:
    what = f"Texts of every length at {steady.rate:.0f} requests a second: {CHOSEN} / {EAGER.name}, p50"
    compared: Compared | str
    if steady.absent:
        compared = "; ".join(steady.absent.values())
    elif errors := steady.errors(CHOSEN):
        compared = f"{errors} requests got no good answer"
    else:
        compared = Compared(steady.p50_ms(CHOSEN).over(steady.p50_ms(EAGER.name)), EAGER.name)
    return _judged(what, compared, "≤", LATENCY_OF_EAGER)


@dataclass(frozen=True)
class Compared:
    """How many times another's number something is, and whose."""

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
    return next((raced.race.absent[name] for name in names if name in raced.race.absent), None)


def _judged(what: str, compared: Compared | str, sign: Literal["≥", "≤"], limit: float) -> Goal:
    goal = f"{sign} {limit:g}"
    if isinstance(compared, str):
        return Goal(what, goal, compared, "open")
    reached = compared.ratio.median
    return Goal(what, goal, str(compared), verdict(reached >= limit if sign == "≥" else reached <= limit))


def _at(connections: int) -> str:
    return f"{connections} connection{'s' * (connections > 1)}"
