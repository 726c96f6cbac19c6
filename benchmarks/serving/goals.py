"""What was to be reached, beside what was."""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.markdown import verdict
from benchmarks.serving.cases import BATCHING_OFF, CHOSEN, RAYLOOM, SAME_FILE_LOOP
from benchmarks.serving.findings import Findings, Raced
from benchmarks.serving.peers import EAGER
from benchmarks.serving.race import Race

FASTER_THAN_PEERS = 1.5
OF_THE_LOOP = 0.95
NO_SLOWER = 1.03
"""Times the latency without batching: what two runs of the same differ by."""

CHOSEN_FASTER_THAN_PEERS = 2.5
FASTER_THAN_EAGER, LATENCY_OF_EAGER = 7.0, 0.2
_FEW, _SOME, _MANY = 1, 16, 64


@dataclass(frozen=True)
class Goal:
    """One row of the first table."""

    what: str
    goal: str
    reached: str
    verdict: str


def goals(found: Findings) -> list[Goal]:
    """Every goal of the races that were run."""
    rows = {"cnn": _cnn, "encoder": _encoder, "texts": _texts}
    return [goal for name, raced in found.races.items() for goal in rows[name](raced)]


def _cnn(raced: Raced) -> Iterator[Goal]:
    for connections in (_SOME, _MANY):
        yield _rate_over_best_peer(raced, RAYLOOM, connections, FASTER_THAN_PEERS)
        yield _p99_beside_best_peer(raced, connections)


def _encoder(raced: Raced) -> Iterator[Goal]:
    race = raced.race
    what = f"{raced.title}: Rayloom / the bare loop's best rows a second, {_MANY} connections"
    if (missing := _missing(race, RAYLOOM)) is not None:
        yield Goal(what, f"≥ {OF_THE_LOOP}", missing, "open")
    else:
        share = race.results[RAYLOOM].rate(_MANY).over(race.loops[SAME_FILE_LOOP])
        yield Goal(what, f"≥ {OF_THE_LOOP}", str(share), verdict(share.median >= OF_THE_LOOP))
    what = f"{raced.title}: p50 of Rayloom / without batching, {_FEW} connection"
    if (missing := _missing(race, RAYLOOM, BATCHING_OFF)) is not None:
        yield Goal(what, f"≤ {NO_SLOWER}", missing, "open")
    else:
        ratio = race.results[RAYLOOM].p50_ms(_FEW).over(race.results[BATCHING_OFF].p50_ms(_FEW))
        yield Goal(what, f"≤ {NO_SLOWER}", str(ratio), verdict(ratio.median <= NO_SLOWER))
    what = f"{raced.title}: rows a second of Rayloom / without batching, {_MANY} connections"
    if _missing(race, RAYLOOM, BATCHING_OFF) is None:
        ratio = race.results[RAYLOOM].rate(_MANY).over(race.results[BATCHING_OFF].rate(_MANY))
        yield Goal(what, "shown", str(ratio), "")
    yield _rate_over_best_peer(raced, CHOSEN, _MANY, CHOSEN_FASTER_THAN_PEERS)


def _texts(raced: Raced) -> Iterator[Goal]:
    race, eager = raced.race, EAGER.name
    for connections in (_FEW, _SOME, _MANY):
        rate = f"{raced.title}: rows a second of {CHOSEN} / {eager}, {connections} connections"
        latency = f"{raced.title}: p50 of {CHOSEN} / {eager}, {connections} connections"
        if (missing := _missing(race, CHOSEN, eager)) is not None:
            yield Goal(rate, f"≥ {FASTER_THAN_EAGER:g}", missing, "open")
            yield Goal(latency, f"≤ {LATENCY_OF_EAGER}", missing, "open")
            continue
        mine, theirs = race.results[CHOSEN], race.results[eager]
        faster = mine.rate(connections).over(theirs.rate(connections))
        sooner = mine.p50_ms(connections).over(theirs.p50_ms(connections))
        yield Goal(rate, f"≥ {FASTER_THAN_EAGER:g}", str(faster), verdict(faster.median >= FASTER_THAN_EAGER))
        yield Goal(latency, f"≤ {LATENCY_OF_EAGER}", str(sooner), verdict(sooner.median <= LATENCY_OF_EAGER))


def _rate_over_best_peer(raced: Raced, name: str, connections: int, least: float) -> Goal:
    race, best = raced.race, raced.race.fastest(raced.peers, connections)
    what = f"{raced.title}: {name} / the best peer, rows a second, {connections} connections"
    if (missing := _missing(race, name)) is not None or best is None:
        return Goal(what, f"≥ {least}", missing or "no peer ran", "open")
    ratio = race.results[name].rate(connections).over(race.results[best].rate(connections))
    return Goal(what, f"≥ {least}", f"{ratio}, over {best}", verdict(ratio.median >= least))


def _p99_beside_best_peer(raced: Raced, connections: int) -> Goal:
    race, best = raced.race, raced.race.fastest(raced.peers, connections)
    what = f"{raced.title}: p99 of Rayloom / of that peer, {connections} connections"
    if (missing := _missing(race, RAYLOOM)) is not None or best is None:
        return Goal(what, "≤ 1", missing or "no peer ran", "open")
    ratio = race.results[RAYLOOM].p99_ms(connections).over(race.results[best].p99_ms(connections))
    return Goal(what, "≤ 1", str(ratio), verdict(ratio.median <= 1.0))


def _missing(race: Race, *names: str) -> str | None:
    """Why one of them was not measured; None if all were."""
    return next((race.absent.get(name, "not asked for") for name in names if name not in race.results), None)
