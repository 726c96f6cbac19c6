"""The queue in which a cluster's jobs wait for room: their order, and how a waiting job prints its place."""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from getpass import getuser
from typing import Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, ValidationError

from app.amounts import suffices
from app.errors import ClusterError, short_repr

Priority = Literal["low", "normal", "high"]
USER, PRIORITY = "rayloom_user", "rayloom_priority"
"""The keys in a job's metadata."""
_PRIORITIES: tuple[Priority, ...] = get_args(Priority)
_MAX_USER = 128
"""Maximum length of a user's name."""
_PREFIX = "QUEUE "
STARTED = "the job's turn has come"
"""What a job that has waited prints when it starts."""

Amounts = Mapping[str, float]
"""Amounts of resources by Ray's names."""


class Queued(BaseModel):
    """A job that waits for its turn, or has started and not ended."""

    model_config = ConfigDict(allow_inf_nan=False)

    ticket: str
    """Its key in the queue. Two processes may belong to one job, so its id is no key."""
    job: str
    """The id of its submission, for people; of its driver if it was started by hand."""
    driver: str
    """The ids that Ray has given to its process and node."""
    user: str
    priority: Priority
    demand: dict[str, NonNegativeFloat]
    """The minimum of resources that the job needs."""
    each: dict[str, float] = {}
    """What each of its processes needs on one node; empty if they differ."""
    since: float
    """When it joined the queue, in seconds since 1970."""


def person() -> str:
    """Return the name of the person who submits jobs here: ``RAYLOOM_USER``, else the operating system's user.

    Raises:
        ClusterError: as ``user_of``.
    """
    try:
        return user_of(os.environ.get("RAYLOOM_USER") or getuser())
    except (KeyError, OSError):  # in a container without a name for its user
        return str(os.getuid())


def user_of(given: str) -> str:
    """Return a user's name. Raise ClusterError if others could not read it in a list or a log."""
    if given.isprintable() and given == given.strip() and len(given) <= _MAX_USER:
        return given
    raise ClusterError(
        f"the user's name is {short_repr(given)}: set RAYLOOM_USER to at most {_MAX_USER} printable characters, "
        "without spaces around them"
    ).of("user.unreadable")


def priority_of(given: str | None) -> Priority:
    """Return the priority in a job's metadata. Raise ClusterError if there is no such priority."""
    for priority in _PRIORITIES:
        if priority == (given or "normal"):
            return priority
    raise ClusterError(f"the job's metadata {PRIORITY} is {given!r}: give one of {', '.join(_PRIORITIES)}").of(
        "priority.unknown", PRIORITY
    )


def in_line(
    waiting: Iterable[Queued], started: Iterable[Queued], total: Amounts, turns: Mapping[str, int]
) -> list[Queued]:
    """Return the waiting jobs in the order of their turns, if no other job joins.

    A higher priority goes first. Then the user goes first whose jobs have the smallest dominant share: the largest of
    their shares of each resource (Ghodsi et al. 2011, Dominant Resource Fairness). If shares are equal, the user whose
    last start was longest ago goes first, so people alternate where one job fills the cluster. Then the oldest job.

    Args:
        turns: the number of each user's last start. Later starts have higher numbers.
    """
    held: dict[str, dict[str, float]] = defaultdict(dict)
    last, now = dict(turns), max(turns.values(), default=0)
    for job in started:
        if fits(job.demand, total):  # else it holds nothing
            _add(held[job.user], job.demand)
    shares = {user: _largest_share(amounts, total) for user, amounts in held.items()}
    # A user's jobs of one priority are compared by age alone, so only the oldest of them is compared with others.
    stacks: dict[tuple[str, Priority], list[Queued]] = defaultdict(list)
    for job in sorted(waiting, key=lambda job: (job.since, job.ticket), reverse=True):
        stacks[job.user, job.priority].append(job)
    line = list[Queued]()
    while stacks:
        following = min(
            (stack[-1] for stack in stacks.values()),
            key=lambda job: (
                -_PRIORITIES.index(job.priority),
                shares.get(job.user, 0.0),
                last.get(job.user, 0),
                job.since,
                job.ticket,
            ),
        )
        user, stack = following.user, stacks[following.user, following.priority]
        line.append(stack.pop())
        if not stack:
            del stacks[user, following.priority]
        _add(held[user], following.demand)
        shares[user], last[user] = _largest_share(held[user], total), now + len(line)
    return line


def _largest_share(held: Amounts, total: Amounts) -> float:
    return max((amount / total[kind] for kind, amount in held.items() if total.get(kind)), default=0.0)


def fits(demand: Amounts, room: Amounts) -> bool:
    """Return whether ``room`` has every amount of ``demand``."""
    return all(suffices(room.get(kind, 0.0), amount) for kind, amount in demand.items())


def placeable(started: Iterable[Queued], nodes: Sequence[Amounts]) -> list[Queued]:
    """Return the jobs whose processes a node is large enough for. The others hold nothing.

    Args:
        nodes: the resources of each node.
    """
    return [job for job in started if any(fits(job.each, node) for node in nodes)]


def may_start(demand: Amounts, started: Iterable[Queued], total: Amounts, free: Amounts, may_grow: bool) -> bool:
    """Return whether the first in line may start.

    The needs of started jobs count in full, because they may not have taken their resources yet. A job that needs more
    than the whole cluster holds nothing, so it does not count. On a cluster that grows, a job may ask for new nodes
    once the nodes of the started jobs have come.

    Args:
        total: the cluster's resources.
        free: the resources that Ray reports as free.
    """
    taken = _sum(job.demand for job in started if fits(job.demand, total))
    if not taken or (may_grow and fits(taken, total)):
        return True
    room = {kind: min(total.get(kind, 0.0) - taken.get(kind, 0.0), free.get(kind, 0.0)) for kind in demand}
    return fits(demand, room)


def _sum(demands: Iterable[Amounts]) -> dict[str, float]:
    total: dict[str, float] = {}
    for demand in demands:
        _add(total, demand)
    return total


def _add(total: dict[str, float], demand: Amounts) -> None:
    for kind, amount in demand.items():
        total[kind] = total.get(kind, 0.0) + amount


class Place(BaseModel):
    """The place of a waiting job, which it prints in its log for ``rayloom jobs`` and for people."""

    user: str
    priority: Priority
    place: int
    """Its place in the line, from 1."""
    waiting: int
    """The number of jobs in the line."""
    needs: dict[str, float]
    behind: list[str]
    """The jobs that it waits for: those before it in the line, and those that have started."""

    def to_line(self) -> str:
        """Return the line of the log."""
        return _PREFIX + json.dumps(self.model_dump(), ensure_ascii=False)

    @classmethod
    def of_log(cls, lines: Sequence[str]) -> Self | None:
        """Return the last place in a log; None if the job does not wait, or no longer."""
        for line in reversed(lines):
            if line == STARTED:
                return None
            if place := cls.of_line(line):
                return place
        return None

    @classmethod
    def of_line(cls, line: str) -> Self | None:
        """Return the place in a line of a log; None if the line has none."""
        if not line.startswith(_PREFIX):
            return None
        try:
            return cls.model_validate_json(line.removeprefix(_PREFIX))
        except ValidationError:  # the line of another program
            return None

    @property
    def reason(self) -> str:
        """What the job waits for, in a few words."""
        needs = " and ".join(f"{amount:g} {kind}" for kind, amount in self.needs.items() if amount)
        first = ", ".join(self.behind[:2]) + (f" and {len(self.behind) - 2} more" if len(self.behind) > 2 else "")
        return f"{needs}, after {first}"

    @property
    def sentence(self) -> str:
        """The place as a person reads it."""
        return f"waiting, place {self.place} of {self.waiting} ({self.user}, {self.priority}), for {self.reason}"
