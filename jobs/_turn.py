"""A job's turn on a cluster that is full. The jobs keep the queue themselves, in the key-value store of Ray's GCS.

Each job writes its needs under its ticket, and polls until it is the first in line and has room. To start, it writes
its ticket under the next number, which only one job can do. A job that loses this race polls again. The entries of a
killed job do not count, because the GCS lists its process as ended.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self
from uuid import uuid4

import ray
from pydantic import ValidationError

from app.best_effort import best_effort, warn
from app.cluster.queue import (
    PRIORITY,
    STARTED,
    USER,
    Place,
    Queued,
    fits,
    in_line,
    may_start,
    person,
    placeable,
    priority_of,
    user_of,
)
from app.config import Recipe
from app.runs import Outcome, Run, Step
from jobs._cluster import connect, may_grow
from jobs._metadata_internals import SUBMISSION_KEY, job_metadata
from jobs._queue_internals import Store, driver_id, living_drivers

Demand = Callable[[Recipe], Mapping[str, float]]
_POLL_S, _MAX_POLL_S = 1.0, 10.0
"""Time between two looks at the queue: of the first in line, and the maximum of those behind it."""
_FIRST = 3
"""This many jobs, the first in line, ask at every look which others live. More would only load the GCS."""
_ASK_PERIOD_S = 30.0
"""Time between two such questions of the others in line."""
_UNKNOWN_S = 60.0
"""Maximum time that a job waits for others of which it is unknown whether they live."""
_JOBS, _STARTS, _TURNS = "jobs/", "starts/", "turns/"
"""Prefixes of keys: what each job needs, which job has started under each number, and each user's last number."""


def in_turn(step: Step, demand: Demand, each: Demand | None = None) -> Step:
    """Return a job's step that first waits for the job's turn.

    Args:
        demand: returns the minimum of resources that the job needs.
        each: returns what each of its processes needs on one node, if that is the same for all.
    """

    def wait_and_run(run: Run) -> Outcome:
        connect()
        with _turn(demand(run.recipe), each(run.recipe) if each else {}):
            return step(run)

    return wait_and_run


@contextmanager
def _turn(demand: Mapping[str, float], each: Mapping[str, float]) -> Iterator[None]:
    """Wait for the job's turn, and hold it within the block."""
    if not may_grow() and not fits(demand, ray.cluster_resources()):
        yield  # the step is refused: no other job could make room for it
        return
    own, store = _own(demand, each), Store()
    store.put(_JOBS + own.ticket, own.model_dump_json())
    try:
        _await(own, store)
        yield
    finally:
        # Otherwise the next job would have to ask Ray whether this one has ended.
        best_effort(lambda: store.remove(_JOBS + own.ticket), "this job cannot leave the queue", "the job's end")


def _own(demand: Mapping[str, float], each: Mapping[str, float]) -> Queued:
    metadata = job_metadata()
    return Queued(
        ticket=uuid4().hex,
        job=metadata.get(SUBMISSION_KEY) or ray.get_runtime_context().get_job_id(),
        driver=driver_id(),
        user=user_of(metadata.get(USER) or person()),
        priority=priority_of(metadata.get(PRIORITY)),
        demand=_without_zeros(demand),
        each=_without_zeros(each),
        since=time.time(),
    )


def _without_zeros(amounts: Mapping[str, float]) -> dict[str, float]:
    return {kind: amount for kind, amount in amounts.items() if amount}


@dataclass(frozen=True)
class _Line:
    """The jobs in the store that have not ended."""

    waiting: list[Queued]
    started: list[Queued]
    turns: dict[str, int]
    """The number of each user's last start."""
    last: int
    """The highest number under which a job has started."""
    leftovers: list[str]
    """Keys of jobs that have ended."""

    @classmethod
    def read(cls, store: Store, own: Queued, dead: Collection[str]) -> Self:
        """Read the store. ``dead`` are tickets of jobs that have ended without removing their keys."""
        # Read the starts before the jobs. A job that starts from here on takes the number after ``last``. A job that
        # has started before has already written its key.
        starts, known = _starts_in(store), _jobs_in(store)
        present = {job.ticket: job for job in known.values() if job.ticket not in dead}
        if own.ticket not in present:  # a GCS without persistent storage has restarted
            store.put(_JOBS + own.ticket, own.model_dump_json())
            present[own.ticket] = own
        begun = set(starts.values())
        return cls(
            waiting=[job for job in present.values() if job.ticket not in begun],
            started=[job for job in present.values() if job.ticket in begun],
            turns={key.removeprefix(_TURNS): int(number) for key, number in store.items(_TURNS) if number.isdecimal()},
            last=max(starts, default=0),
            leftovers=[
                *(key for key, job in known.items() if job.ticket in dead),
                *(f"{_STARTS}{number}" for number, ticket in starts.items() if ticket not in present),
            ],
        )

    def others(self, own: Queued) -> list[Queued]:
        """Return the jobs except ``own``."""
        return [job for job in (*self.waiting, *self.started) if job.ticket != own.ticket]


class _Deaths:
    """Which jobs have ended without leaving the queue, because they were killed."""

    def __init__(self) -> None:
        self.dead: set[str] = set()
        """Their tickets."""
        self._asked_at = -_ASK_PERIOD_S
        self._unknown_since: float | None = None

    def look(self, others: list[Queued], place: int) -> bool:
        """Ask which of the others live, unless that would load the GCS too much. Return whether any has died.

        Call it after the others were read from the store: a process is in the GCS's table before it is in the queue.
        """
        now = time.monotonic()
        is_due = place < _FIRST or self._unknown_since is not None or now - self._asked_at >= _ASK_PERIOD_S
        if not (others and is_due):
            return False
        self._asked_at, living = now, living_drivers()
        if living is None:
            self._unknown_since = self._unknown_since or now
            return False
        self._unknown_since = None
        dead = {job.ticket for job in others if job.driver not in living}
        self.dead |= dead
        return bool(dead)

    @property
    def are_unknown(self) -> bool:
        """Whether the GCS has not answered for long."""
        return self._unknown_since is not None and time.monotonic() - self._unknown_since >= _UNKNOWN_S


def _starts_in(store: Store) -> dict[int, str]:
    """Return the tickets of the jobs that have started, by number. Keys that are no numbers are not ours."""
    numbered = ((key.removeprefix(_STARTS), ticket) for key, ticket in store.items(_STARTS))
    return {int(number): ticket for number, ticket in numbered if number.isdecimal()}


def _jobs_in(store: Store) -> dict[str, Queued]:
    """Return the jobs that wait or have started, by key."""
    jobs = {key: _readable(text) for key, text in store.items(_JOBS)}
    return {key: job for key, job in jobs.items() if job}


def _readable(text: str) -> Queued | None:
    try:
        return Queued.model_validate_json(text)
    except ValidationError:
        return None  # of another version of Rayloom


def _await(own: Queued, store: Store) -> None:
    """Wait until it is the job's turn. Print its place whenever it changes."""
    shown, deaths = None, _Deaths()
    while True:
        line, total = _Line.read(store, own, deaths.dead), ray.cluster_resources()
        holding = placeable(line.started, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        order = in_line(line.waiting, holding, total, line.turns)
        place = _place_of(own, order)
        if deaths.look(line.others(own), place):
            continue
        is_next = place == 0 and may_start(own.demand, holding, total, ray.available_resources(), may_grow())
        if is_next or deaths.are_unknown:
            if _start(own, line, store):
                if not is_next:
                    warn("Ray does not say which other jobs still run: this job starts without its turn")
                if shown:
                    print(STARTED, flush=True)
                return
            continue
        told = _told(own, order, holding).to_line()
        if told != shown:
            print(told, flush=True)
        shown = told
        time.sleep(min(_POLL_S * (place + 1), _MAX_POLL_S))


def _place_of(own: Queued, order: list[Queued]) -> int:
    return next(place for place, job in enumerate(order) if job.ticket == own.ticket)


def _told(own: Queued, order: list[Queued], started: list[Queued]) -> Place:
    place = _place_of(own, order)
    return Place(
        user=own.user,
        priority=own.priority,
        place=place + 1,
        waiting=len(order),
        needs=own.demand,
        behind=[job.job for job in (*order[:place], *started)],
    )


def _start(own: Queued, line: _Line, store: Store) -> bool:
    """Take the next number. Return False if another job has taken it since ``line`` was read."""
    number = line.last + 1
    if not store.put_new(f"{_STARTS}{number}", own.ticket):
        return False
    if max(_starts_in(store)) > number:
        # This process was stopped for so long that the number was taken, used and removed.
        store.remove(f"{_STARTS}{number}")
        return False
    store.put(_TURNS + own.user, str(number))
    # The highest number stays, because the next job counts from it.
    for key in line.leftovers:
        store.remove(key)
    return True
