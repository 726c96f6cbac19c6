"""What runs next, and whether it runs now: pure decisions over what waits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from app.serving.batching.groups import Group, Request
from app.serving.batching.policy import BatchingPolicy
from app.serving.batching.statistics import ReleaseReason
from app.tensors import Tensors, slice_rows

_MIN_HOLD_S = 0.1e-3
"""A free slot is not held for less: waking its thread takes as long."""


class Part(NamedTuple):
    """Rows of a request, from ``start`` to before ``stop``, in one call."""

    request: Request
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def tensors(self) -> Tensors:
        """The inputs."""
        whole = self.rows == self.request.rows
        return self.request.tensors if whole else slice_rows(self.request.tensors, self.start, self.stop)


@dataclass(frozen=True, eq=False)
class Batch:
    """One call of the engine."""

    group: Group
    parts: Sequence[Part]
    reason: ReleaseReason

    @cached_property
    def rows(self) -> int:
        return _rows(self.parts)


@dataclass(frozen=True)
class Hold:
    """Nothing runs before then, unless a request arrives."""

    until_s: float


@dataclass(frozen=True)
class GiveUp:
    """Requests that cannot be answered in time, unless others are late for it."""

    requests: Sequence[Request]


def release(group: Group, policy: BatchingPolicy, now_s: float, hold_until_s: float) -> Batch | Hold | GiveUp:
    """What a free slot does for a group in which requests wait.

    A call has as many rows as it may, of the most urgent and oldest requests first. A request that does not fit as a
    whole gives the rows that fit. If preferred sizes are set, a call that is not full ends with the largest of them
    that whole requests add up to.

    Args:
        hold_until_s: how long the slot may be kept idle where that pays; -inf if it may not.
    """
    parts, reason = _gather(group, policy)
    ends_s = now_s + group.latency.seconds(_rows(parts))
    deadline_s = min(part.request.deadline_s for part in parts)
    if ends_s > deadline_s and len(parts) > 1:
        return _in_time(group, now_s, parts)
    if reason is not None:
        return Batch(group, parts, reason)
    until_s = _pays_until_s(group, len(parts), hold_until_s)
    if until_s <= now_s:
        held = -math.inf < hold_until_s <= now_s
        return Batch(group, parts, ReleaseReason.DELAY if held else ReleaseReason.IDLE)
    if until_s - now_s + ends_s > deadline_s:
        return Batch(group, parts, ReleaseReason.DEADLINE)
    return Hold(until_s)


def _gather(group: Group, policy: BatchingPolicy) -> tuple[list[Part], ReleaseReason | None]:
    """What goes into a call, and why it need not wait for more, if that is so."""
    parts: list[Part] = []
    rows = preferred = 0
    for request in group:
        more = min(request.rows - request.taken, group.max_rows - rows)
        parts.append(Part(request, request.taken, request.taken + more))
        rows += more
        if rows == group.max_rows:
            return parts, ReleaseReason.FULL
        if rows in policy.preferred_batch_sizes:
            preferred = len(parts)
    return (parts[:preferred], ReleaseReason.PREFERRED) if preferred else (parts, None)


def _pays_until_s(group: Group, requests: int, hold_until_s: float) -> float:
    """Return until when it pays to wait for one more request, ``hold_until_s`` at most; -inf if it does not.

    Let n requests wait, let a call of r rows take a·r + b, and let the next request come in d seconds, with as many
    rows as the others have on average. Then the engine answers more requests a second with it than without it if

        (n + 1) / (d + a·r (n + 1) / n + b) > n / (a·r + b)        that is        n·d < b

    d is a guess, and those that wait pay for a wrong one: half of that must be enough.
    """
    since_s = group.arrivals.since_s
    if since_s is None:
        return -math.inf
    until_s = min(hold_until_s, since_s + group.latency.call_s / (2 * requests))
    if until_s - since_s < _MIN_HOLD_S:
        return -math.inf
    return until_s if since_s + group.arrivals.gap_s < until_s else -math.inf


def _in_time(group: Group, now_s: float, parts: Sequence[Part]) -> Batch | GiveUp:
    """What to do if the call of all parts would end after a deadline of theirs.

    The first of them run, as many as are in time, if the others of the same level can still be answered in time after
    that. If not, there is more to do than time for it: calls that get smaller and smaller to suit the oldest would
    answer fewer and fewer. So those with the least time are given up, until the others are in time together; this is
    the early drop of Nexus (SOSP 2019). A request that has begun is never given up.
    """
    level = parts[0].request.level
    waiting = sum(request.rows - request.taken for request in group.levels[level - 1])
    first = parts[: _count_in_time(group, now_s, parts)]
    ends_s = now_s + group.latency.seconds(_rows(first))
    rest_s = group.latency.seconds(min(waiting - _rows(first), group.max_rows))
    later = [part.request.deadline_s for part in parts[len(first) :] if part.request.level == level]
    if not later or (first and ends_s + rest_s <= min(later)):
        return Batch(group, first, ReleaseReason.DEADLINE)
    peers = [part for part in parts if part.request.level == level and not part.request.taken]
    peers.sort(key=lambda part: part.request.deadline_s)
    given_up: list[Request] = []
    for part in peers[:-1]:
        if now_s + group.latency.seconds(min(waiting, group.max_rows)) <= part.request.deadline_s:
            break
        given_up.append(part.request)
        waiting -= part.rows
    return GiveUp(given_up) if given_up else Batch(group, parts[:1], ReleaseReason.DEADLINE)


def _count_in_time(group: Group, now_s: float, parts: Sequence[Part]) -> int:
    """How many parts, from the first on, fit into a call that ends before their deadlines."""
    rows, deadline_s = 0, math.inf
    for count, part in enumerate(parts):
        rows += part.rows
        deadline_s = min(deadline_s, part.request.deadline_s)
        if now_s + group.latency.seconds(rows) > deadline_s:
            return count
    return len(parts)


def _rows(parts: Sequence[Part]) -> int:
    return sum(part.stop - part.start for part in parts)
