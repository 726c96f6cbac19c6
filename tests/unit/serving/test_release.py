"""Decisions for a free slot, worked out by hand. A call of n rows takes 4 + n seconds; all times are from now."""

import asyncio
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from app.serving.batching.scheduler import BatchingPolicy, GiveUp, Group, Hold, QueuedRequest, RequestBatch, release
from app.serving.batching.statistics import ReleaseReason
from app.tensors import Tensors

POLICY = BatchingPolicy(max_batch_size=8, priority_levels=2)
NEVER = -math.inf
NOW = 16.0


@pytest.fixture(autouse=True)
def _loop() -> Iterator[None]:
    """An event loop for the futures of requests."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    loop.close()
    asyncio.set_event_loop(None)


def request(rows: int = 1, deadline_s: float = math.inf, level: int = 1, scheduled: int = 0) -> QueuedRequest:
    group, answer = Group(POLICY, 8), asyncio.get_event_loop().create_future()
    tensors: Tensors = {"x": np.arange(rows)}
    return QueuedRequest(tensors, rows, level, 0, NOW, NOW + deadline_s, group, answer, scheduled)


def group_of(*requests: QueuedRequest, expected_in_s: float | None = None, policy: BatchingPolicy = POLICY) -> Group:
    """Return a group with these waiting requests, in order. The next is expected in ``expected_in_s`` seconds."""
    group = Group(policy, policy.max_batch_size)
    group.latency.row_s, group.latency.call_s = 1.0, 4.0
    for waiting in requests:
        group.levels[waiting.level - 1].append(waiting)
    if expected_in_s is not None:
        group.arrivals.since_s, group.arrivals.gap_s = NOW, expected_in_s
    return group


def released(
    group: Group, policy: BatchingPolicy = POLICY
) -> tuple[list[tuple[QueuedRequest, int, int]], ReleaseReason]:
    """Return the parts of the batch that runs now, and the reason for its release."""
    batch = release(group, policy, NOW, NEVER)
    assert isinstance(batch, RequestBatch)
    assert batch.group is group
    assert batch.rows == sum(part.rows for part in batch.parts)
    return [tuple(part) for part in batch.parts], batch.reason


def given_up(group: Group) -> Sequence[QueuedRequest]:
    decision = release(group, POLICY, NOW, NEVER)
    assert isinstance(decision, GiveUp)
    return decision.requests


def decided(group: Group, hold_s: float) -> float | ReleaseReason:
    """Return how long the slot is held idle, at most ``hold_s``, or the reason why a batch runs now."""
    decision = release(group, POLICY, NOW, NOW + hold_s)
    if isinstance(decision, Hold):
        return decision.until_s - NOW
    assert isinstance(decision, RequestBatch)
    return decision.reason


def test_a_request_that_does_not_fit_gives_the_rows_that_fit() -> None:
    begun, next_one = request(rows=5, scheduled=2), request(rows=9)
    assert released(group_of(begun, next_one)) == ([(begun, 2, 5), (next_one, 0, 5)], ReleaseReason.FULL)


def test_a_part_has_the_tensors_of_its_rows() -> None:
    whole, begun = request(rows=2), request(rows=3, scheduled=1)
    batch = release(group_of(whole, begun), POLICY, NOW, NEVER)
    assert isinstance(batch, RequestBatch)
    assert [part.tensors["x"].tolist() for part in batch.parts] == [[0, 1], [1, 2]]


def test_a_call_ends_with_the_largest_preferred_size_that_whole_requests_add_up_to() -> None:
    policy = BatchingPolicy(max_batch_size=8, preferred_batch_sizes=(2, 4), priority_levels=2)
    waiting = [request(), request(), request(rows=2), request()]
    taken, reason = released(group_of(*waiting, policy=policy), policy)
    assert [part[0] for part in taken] == waiting[:3]
    assert reason is ReleaseReason.PREFERRED


def test_a_call_that_ends_at_a_deadline_is_in_time() -> None:
    first, second = request(deadline_s=6.0), request(deadline_s=6.0)
    assert released(group_of(first, second)) == ([(first, 0, 1), (second, 0, 1)], ReleaseReason.IDLE)


def test_one_that_is_late_by_itself_is_tried_all_the_same() -> None:
    late, other = request(deadline_s=3.0), request(level=2)
    assert released(group_of(late)) == ([(late, 0, 1)], ReleaseReason.IDLE)
    assert released(group_of(late, other)) == ([(late, 0, 1)], ReleaseReason.DEADLINE)


def test_a_call_stays_small_for_an_urgent_request_whatever_becomes_of_others() -> None:
    urgent, *others = request(deadline_s=5.0), request(deadline_s=5.5, level=2), request(deadline_s=5.5, level=2)
    assert released(group_of(urgent, *others)) == ([(urgent, 0, 1)], ReleaseReason.DEADLINE)


def test_a_call_stays_small_if_the_others_of_its_level_are_in_time_after_it() -> None:
    """The first call ends at 5 s and the call of the other request at 10 s. The eight rows run after both."""
    begun, less_urgent = request(rows=3, scheduled=2, deadline_s=5.0), request(rows=8, level=2)
    alone = [(begun, 2, 3)], ReleaseReason.DEADLINE
    assert released(group_of(begun, request(deadline_s=10.0), less_urgent)) == alone
    too_soon = request(deadline_s=9.75)
    assert released(group_of(begun, too_soon, less_urgent)) == alone, "one that has begun is not given up"
    first = request(deadline_s=5.0)
    assert given_up(group_of(first, too_soon, less_urgent)) == [first]


@pytest.mark.parametrize(
    ("deadlines_s", "lost"),
    [
        ((5.0, 6.0, 6.0), 1),  # the other two together take 6 s
        ((5.0, 5.0, 6.0), 2),
        ((5.0, 5.0), 1),
        ((3.0, 3.0, 3.0), 2),  # one request runs in any case
    ],
)
def test_those_with_the_least_time_are_given_up_until_the_others_are_in_time(
    deadlines_s: tuple[float, ...], lost: int
) -> None:
    waiting = [request(deadline_s=deadline_s) for deadline_s in deadlines_s]
    assert given_up(group_of(*waiting)) == waiting[:lost]
    assert given_up(group_of(*reversed(waiting)))[0].deadline_s == NOW + deadlines_s[0]


@pytest.mark.parametrize(
    ("waiting", "expected_in_s", "decision"),
    # Two waiting requests are held for half of 4 s / 2, so 1 s, if the next is expected sooner; one request for 2 s.
    [(1, 1.75, 2.0), (2, 0.75, 1.0), (2, 1.0, ReleaseReason.IDLE), (2, None, ReleaseReason.IDLE)],
)
def test_a_slot_is_kept_idle_as_long_as_that_pays(
    waiting: int, expected_in_s: float | None, decision: float | ReleaseReason
) -> None:
    group = group_of(*(request() for _ in range(waiting)), expected_in_s=expected_in_s)
    assert decided(group, hold_s=10.0) == decision


@pytest.mark.parametrize(
    ("hold_s", "deadline_s", "decision"),
    [
        (1.5, math.inf, 1.5),
        (1.5, 6.5, 1.5),  # it is answered at 6.5 s, if no request arrives before 1.5 s
        (1.5, 6.25, ReleaseReason.DEADLINE),
        (0.0, math.inf, ReleaseReason.DELAY),
        (NEVER, math.inf, ReleaseReason.IDLE),
    ],
)
def test_nobody_is_held_beyond_the_bound_or_into_a_deadline(
    hold_s: float, deadline_s: float, decision: float | ReleaseReason
) -> None:
    assert decided(group_of(request(deadline_s=deadline_s), expected_in_s=0.0), hold_s) == decision


@pytest.mark.parametrize(("call_s", "held_s"), [(4e-4, 2e-4), (1e-4, ReleaseReason.IDLE)])
def test_a_slot_is_not_held_for_less_than_its_thread_takes_to_wake(
    call_s: float, held_s: float | ReleaseReason
) -> None:
    group = group_of(request(), expected_in_s=1e-6)
    group.latency.row_s, group.latency.call_s = 0.0, call_s
    held = decided(group, 1.0)
    assert held == (pytest.approx(held_s) if isinstance(held_s, float) else held_s)
