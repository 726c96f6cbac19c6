"""Decides which requests run next, and whether they run now. Pure functions of the waiting requests."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from app.serving.batching.groups import BatchingPolicy, Group, QueuedRequest
from app.serving.batching.statistics import ReleaseReason
from app.tensors import Tensors, slice_rows

_MIN_HOLD_S = 0.1e-3
"""The minimum hold of a free slot: waking its thread takes as long."""


class Part(NamedTuple):
    """Rows of a request, from ``start`` to before ``stop``, in one call."""

    request: QueuedRequest
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
class RequestBatch:
    """One call of the engine."""

    group: Group
    parts: Sequence[Part]
    reason: ReleaseReason

    @cached_property
    def rows(self) -> int:
        return _rows(self.parts)


@dataclass(frozen=True)
class Hold:
    """Nothing runs before ``until_s``, unless a request arrives."""

    until_s: float


@dataclass(frozen=True)
class GiveUp:
    """Requests that cannot be answered in time without making others late."""

    requests: Sequence[QueuedRequest]


def release(group: Group, policy: BatchingPolicy, now_s: float, hold_until_s: float) -> RequestBatch | Hold | GiveUp:
    """Decide what a free slot does for a group with waiting requests.

    A call takes as many rows as it may, from the most urgent and oldest requests first. A request that does not fit as
    a whole contributes the rows that fit. If preferred sizes are set, a call that is not full ends at the largest
    preferred size that whole requests add up to.

    Args:
        hold_until_s: time until which the slot may be kept idle if that pays; -inf if it may not.
    """
    parts, reason = _gather(group, policy)
    ends_s = now_s + group.latency.seconds(_rows(parts))
    deadline_s = min(part.request.deadline_s for part in parts)
    # A single request runs even if it seems too late, so that the latency model notices a faster engine.
    if ends_s > deadline_s and len(parts) > 1:
        return _in_time(group, now_s, parts)
    if reason is not None:
        return RequestBatch(group, parts, reason)
    until_s = _pays_until_s(group, len(parts), hold_until_s)
    if until_s <= now_s:
        held = -math.inf < hold_until_s <= now_s
        return RequestBatch(group, parts, ReleaseReason.DELAY if held else ReleaseReason.IDLE)
    # A hold must not make the call itself late.
    if until_s - now_s + ends_s > deadline_s:
        return RequestBatch(group, parts, ReleaseReason.DEADLINE)
    return Hold(until_s)


def _gather(group: Group, policy: BatchingPolicy) -> tuple[list[Part], ReleaseReason | None]:
    """Return the parts of the next call, and the reason not to wait for more, if there is one."""
    parts: list[Part] = []
    rows = preferred = 0
    for request in group:
        more = min(request.rows - request.scheduled, group.max_rows - rows)
        parts.append(Part(request, request.scheduled, request.scheduled + more))
        rows += more
        if rows == group.max_rows:
            return parts, ReleaseReason.FULL
        if rows in policy.preferred_batch_sizes:
            # The last match is the largest, because rows only grow.
            preferred = len(parts)
    return (parts[:preferred], ReleaseReason.PREFERRED) if preferred else (parts, None)


def _pays_until_s(group: Group, requests: int, hold_until_s: float) -> float:
    """Return the time until which waiting for one more request pays, at most ``hold_until_s``; -inf if it does not.

    Let n requests wait, let a call of r rows take a·r + b, and let the next request come in d seconds, with as many
    rows as the others have on average. Then the engine answers more requests a second with it than without it if

        (n + 1) / (d + a·r (n + 1) / n + b) > n / (a·r + b)        that is        n·d < b

    d is a guess, and waiting requests pay for a wrong one, so the condition demands half of that: 2·n·d < b.
    """
    since_s = group.arrivals.since_s
    if since_s is None:
        return -math.inf
    until_s = min(hold_until_s, since_s + group.latency.call_s / (2 * requests))
    # A shorter hold is over before its thread wakes.
    if until_s - since_s < _MIN_HOLD_S:
        return -math.inf
    return until_s if since_s + group.arrivals.gap_s < until_s else -math.inf


def _in_time(group: Group, now_s: float, parts: Sequence[Part]) -> RequestBatch | GiveUp:
    """Decide what to do if a call of all parts would miss a deadline.

    Run the first parts that are in time together, if the others of their level can still be answered in time after
    that. If they cannot, there is more work than time. Smaller and smaller calls that suit the oldest requests would
    answer fewer and fewer. So give up the requests with the least time until the others are in time together. This is
    the early drop of Nexus (SOSP 2019). A request that has begun is never given up.
    """
    level = parts[0].request.level
    waiting = sum(request.rows - request.scheduled for request in group.levels[level - 1])
    first = parts[: _count_in_time(group, now_s, parts)]
    ends_s = now_s + group.latency.seconds(_rows(first))
    # Look one call ahead: only the rest that fits into the next call counts.
    rest_s = group.latency.seconds(min(waiting - _rows(first), group.max_rows))
    later = [part.request.deadline_s for part in parts[len(first) :] if part.request.level == level]
    if not later or (first and ends_s + rest_s <= min(later)):
        return RequestBatch(group, first, ReleaseReason.DEADLINE)
    # There is more work than time. Give up requests until one call holds the others in time.
    peers = [part for part in parts if part.request.level == level and not part.request.scheduled]
    peers.sort(key=lambda part: part.request.deadline_s)
    given_up: list[QueuedRequest] = []
    for part in peers[:-1]:  # the last one stays, so that something runs
        if now_s + group.latency.seconds(min(waiting, group.max_rows)) <= part.request.deadline_s:
            break
        given_up.append(part.request)
        waiting -= part.rows
    return GiveUp(given_up) if given_up else RequestBatch(group, parts[:1], ReleaseReason.DEADLINE)


def _count_in_time(group: Group, now_s: float, parts: Sequence[Part]) -> int:
    """Return how many parts, from the first on, fit into a call that ends before their deadlines."""
    rows, deadline_s = 0, math.inf
    for count, part in enumerate(parts):
        rows += part.rows
        deadline_s = min(deadline_s, part.request.deadline_s)
        if now_s + group.latency.seconds(rows) > deadline_s:
            return count
    return len(parts)


def _rows(parts: Sequence[Part]) -> int:
    return sum(part.stop - part.start for part in parts)
