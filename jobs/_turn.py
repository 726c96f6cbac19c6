"""A job's turn on a cluster that is full. The jobs keep the queue themselves, in the key-value store of Ray's GCS.

Each job writes its needs, and polls until it is the first in line and has room. To start, it writes its id under the
next number, which only one job can do. A job that loses this race polls again. The entries of a killed job do not
count, because Ray lists the job as ended.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import httpx
import ray
from pydantic import ValidationError

from app.best_effort import best_effort, warn
from app.cluster.jobs import JobsApi
from app.cluster.queue import PRIORITY, USER, Place, Queued, fits, in_line, may_start, person, priority_of
from app.config import Recipe
from app.errors import ClusterError
from app.runs import Outcome, Run, Step
from jobs._cluster import connect, may_grow
from jobs._queue_internals import Store, job_metadata

Demand = Callable[[Recipe], Mapping[str, float]]
_POLL_S = 1.0
_JOBS, _STARTS, _TURNS = "jobs/", "starts/", "turns/"
"""Prefixes of keys: what each job needs, which job has started under each number, and each user's last number."""


def in_turn(step: Step, demand: Demand) -> Step:
    """Return a job's step that first waits for the job's turn."""

    def wait_and_run(run: Run) -> Outcome:
        connect()
        with _turn(demand(run.recipe)):
            return step(run)

    return wait_and_run


@contextmanager
def _turn(demand: Mapping[str, float]) -> Iterator[None]:
    """Wait for the job's turn, and hold it within the block."""
    if not may_grow() and not fits(demand, ray.cluster_resources()):
        yield  # the step is refused: no other job could make room for it
        return
    own, store = _own(demand), Store()
    store.put(_JOBS + own.job, own.model_dump_json())
    try:
        _await(own, store)
        yield
    finally:
        # Otherwise the next job would have to ask Ray whether this one has ended.
        best_effort(lambda: store.remove(_JOBS + own.job), "this job cannot leave the queue", "the job's end")


def _own(demand: Mapping[str, float]) -> Queued:
    metadata = job_metadata()
    return Queued(
        job=metadata.get("job_submission_id") or ray.get_runtime_context().get_job_id(),
        user=metadata.get(USER) or person(),
        priority=priority_of(metadata.get(PRIORITY)),
        demand={kind: amount for kind, amount in demand.items() if amount},
        since=time.time(),
    )


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
    def read(cls, store: Store, own: Queued) -> Self:
        known = _jobs_in(store)
        # A job removes its key when it ends, unless it is killed.
        dead = {job.job for job in known.values()} - {own.job}
        if dead:
            dead -= _living()
        # Read the starts before the jobs, and both after the slow list of living jobs. A job that starts from here on
        # takes the number after ``last``. A job that has started before has already written its key.
        starts = dict(store.items(_STARTS))
        present = {key: job for key, job in _jobs_in(store).items() if job.job not in dead}
        if _JOBS + own.job not in present:  # a GCS without persistent storage has restarted
            store.put(_JOBS + own.job, own.model_dump_json())
            present[_JOBS + own.job] = own
        begun, ids = set(starts.values()), {job.job for job in present.values()}
        return cls(
            waiting=[job for job in present.values() if job.job not in begun],
            started=[job for job in present.values() if job.job in begun],
            turns={key.removeprefix(_TURNS): int(number) for key, number in store.items(_TURNS)},
            last=max(map(_number, starts), default=0),
            leftovers=[
                *(key for key, job in known.items() if job.job in dead),
                *(key for key, job in starts.items() if job not in ids),
            ],
        )


def _number(key: str) -> int:
    return int(key.removeprefix(_STARTS))


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
    shown = None
    while True:
        line, total = _Line.read(store, own), ray.cluster_resources()
        order = [job.job for job in in_line(line.waiting, line.started, total, line.turns)]
        place = order.index(own.job)
        if place == 0 and may_start(own.demand, line.started, total, ray.available_resources(), may_grow()):
            if _start(own, line, store):
                if shown:
                    print("the job's turn has come", flush=True)
                return
            continue
        behind = [*order[:place], *(job.job for job in line.started)]
        told = Place(
            user=own.user,
            priority=own.priority,
            place=place + 1,
            waiting=len(order),
            needs=own.demand,
            behind=behind,
        ).to_line()
        if told != shown:
            print(told, flush=True)
        shown = told
        time.sleep(_POLL_S)


def _start(own: Queued, line: _Line, store: Store) -> bool:
    """Take the next number. Return False if another job has taken it since ``line`` was read."""
    number = line.last + 1
    if not store.put_new(f"{_STARTS}{number}", own.job):
        return False
    if any(_number(key) > number for key, _ in store.items(_STARTS)):
        # This process was stopped for so long that the number was taken, used and removed.
        store.remove(f"{_STARTS}{number}")
        return False
    store.put(_TURNS + own.user, str(number))
    # The highest number stays, because the next job counts from it.
    for key in line.leftovers:
        store.remove(key)
    return True


def _living() -> set[str]:
    """Return the ids of the cluster's jobs that have not ended. Ask until Ray answers."""
    address = ray.init(address="auto", ignore_reinit_error=True, logging_level="warning").dashboard_url
    if not address:
        raise ClusterError("other jobs run, and the cluster has no dashboard to list them: start it with its dashboard")
    api, is_warned = JobsApi.of({**os.environ, "RAY_API_SERVER_ADDRESS": f"http://{address}"}), False
    while True:
        try:
            return api.living()
        except httpx.HTTPError as error:
            if not is_warned:
                warn(f"the cluster's jobs cannot be listed ({error}): this job waits until they can")
            is_warned = True
            time.sleep(_POLL_S)
