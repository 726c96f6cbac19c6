"""Chooses the next call of a free slot, from the waiting requests and the running calls."""

import math
from collections import deque
from collections.abc import Hashable, Iterator

from app.serving.batching.groups import BatchingPolicy, Group, LatencyModel, QueuedRequest
from app.serving.batching.release import GiveUp, Hold, RequestBatch, release
from app.serving.batching.statistics import ReleaseReason
from app.tensors import Tensors

_MAX_GROUPS = 64
"""The number of shapes whose latency is remembered while none of their requests waits."""


class WaitingQueue:
    """The waiting requests by shape, level and arrival."""

    def __init__(self, policy: BatchingPolicy) -> None:
        self._policy = policy
        self._groups: dict[Hashable, Group] = {}
        self.requests = 0

    def __iter__(self) -> Iterator[QueuedRequest]:
        for group in self._groups.values():
            yield from group

    def seconds(self, latency: LatencyModel) -> float:
        """Return the time that all waiting rows take in consecutive calls."""
        return sum(latency.seconds_in_calls(group.rows, group.max_rows) for group in self._groups.values())

    def group(self, shape: Hashable, tensors: Tensors) -> Group:
        """Return the group of ``tensors``, whose shape key is ``shape``. Create the group if it is new."""
        if (group := self._groups.get(shape)) is None:
            if len(self._groups) >= _MAX_GROUPS:
                self._forget()
            group = self._groups[shape] = Group(self._policy, self._policy.max_rows(tensors))
        return group

    def put(self, request: QueuedRequest) -> None:
        """Add a request as the last of its level."""
        request.group.levels[request.level - 1].append(request)
        self.requests += 1
        request.group.rows += request.rows

    def take(self, request: QueuedRequest, rows: int) -> None:
        """Give some rows of a request to a call. With its last row, the request leaves the queue."""
        request.scheduled += rows
        request.group.rows -= rows
        if not request.is_waiting:
            self._leave(request)

    def remove(self, request: QueuedRequest) -> None:
        """Remove a request, if it still waits."""
        if request.is_waiting:
            self.take(request, request.rows - request.scheduled)

    def next(self) -> Group | None:
        """Return the group of the oldest request at the most urgent level; None if none waits."""
        # Numbers rise with arrival, so the smallest is the oldest.
        heads = [head for group in self._groups.values() if (head := group.head)] if self.requests else []
        return min(heads, key=lambda head: (head.level, head.number)).group if heads else None

    def _leave(self, request: QueuedRequest) -> None:
        level = request.group.levels[request.level - 1]
        # Usually the first one leaves. Only a cancelled or late request leaves from the middle.
        if level[0] is request:
            level.popleft()
        else:
            level.remove(request)
        self.requests -= 1

    # If every group has waiting requests, none is dropped. Then the limit of the queue bounds the groups.
    def _forget(self) -> None:
        """Drop the oldest group without waiting requests."""
        for shape, group in self._groups.items():
            if group.head is None:
                del self._groups[shape]
                return


class Scheduler:
    """The waiting requests, the running calls, and the calls to retry.

    The scheduler knows neither threads nor the event loop. Its user holds a lock, and passes the time in seconds.
    """

    def __init__(self, policy: BatchingPolicy, slots: int) -> None:
        self.queue = WaitingQueue(policy)
        self.late: list[QueuedRequest] = []
        """Requests that were dropped because they cannot be answered in time. The caller empties the list."""
        self.closing = False
        """Whether no more requests come. Then none is held back."""
        self.expiry_s = math.inf
        """A time before which no waiting request is late."""
        self._policy = policy
        self._slots = slots
        self._retries: deque[RequestBatch] = deque()
        self._running: dict[RequestBatch, float] = {}  # with their start times
        self._latency = LatencyModel()  # of all shapes
        self._held_s: float | None = None  # the time since which a free slot is kept idle

    @property
    def is_busy(self) -> bool:
        """Whether no slot is free."""
        return len(self._running) >= self._slots

    @property
    def is_running(self) -> bool:
        """Whether any call runs."""
        return bool(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a free slot may find a call to make."""
        return not self.is_busy and bool(self._retries or self.queue.requests)

    def is_full(self, group: Group) -> bool:
        """Return whether the queue is full for a group. Requests that a free slot is about to take do not count."""
        at_once = 0 if self.is_busy else group.max_rows
        return self.queue.requests >= self._policy.queue_limit + at_once

    def running_s(self, now_s: float) -> float:
        """Return the time for which the oldest running call has run; 0 if none runs."""
        return max((now_s - started_s for started_s in self._running.values()), default=0.0)

    def backlog_s(self, now_s: float) -> float:
        """Return the time that all running and waiting rows take, as recent calls went; 0 before the first."""
        running = sum(
            max(0.0, self._latency.seconds(batch.rows) - (now_s - started_s))
            for batch, started_s in self._running.items()
        )
        # The slots share the work.
        return (running + self.queue.seconds(self._latency)) / self._slots

    def put(self, request: QueuedRequest) -> None:
        """Add a request that arrives now."""
        request.group.arrivals.arrived(request.arrived_s)
        self.queue.put(request)
        # An early time is enough: ``expire`` finds what is late, and the exact next time.
        self.expiry_s = min(self.expiry_s, self._start_by_s(request))

    def remove(self, request: QueuedRequest) -> None:
        """Run no more of a request. If none waits any more, a held slot becomes idle."""
        self.queue.remove(request)
        if not self.queue.requests:
            self._held_s = None

    def next(self, now_s: float) -> RequestBatch | Hold | None:
        """Start the next call of a free slot.

        Without one, return a hold that tells when to ask again, or None if nothing waits or no slot is free.
        """
        self.expire(now_s)
        # Retries first, because their requests have waited for a whole call already.
        chosen = None if self.is_busy else self._retry(now_s) or self._release(now_s)
        if isinstance(chosen, Hold):
            # Keep the start of a hold: asking again must not extend the delay.
            if self._held_s is None:
                self._held_s = now_s
        elif chosen is not None:
            self._running[chosen] = now_s
            self._held_s = None
        return chosen

    def succeeded(self, batch: RequestBatch, seconds: float, now_s: float) -> None:
        """Free the slot of a call, and learn from its latency."""
        self._free(batch, now_s)
        self._latency.observe(batch.rows, seconds)
        batch.group.latency.observe(batch.rows, seconds)
        # A request that was split counts once, with its last rows.
        batch.group.arrivals.answered(sum(part.stop == part.request.rows for part in batch.parts))

    def failed(self, batch: RequestBatch, now_s: float) -> None:
        """Free the slot of a failed call, and retry its halves. Drop a single request, which has failed."""
        # A failed call says nothing about latency.
        self._free(batch, now_s)
        if len(batch.parts) > 1:
            # Bisect: the request that makes a call fail is found, and all others are answered.
            half = len(batch.parts) // 2
            for parts in (batch.parts[:half], batch.parts[half:]):
                self._retries.append(RequestBatch(batch.group, parts, ReleaseReason.RETRY))
        else:
            self.remove(batch.parts[0].request)

    def expire(self, now_s: float) -> None:
        """Drop requests that can no longer be answered in time.

        While a slot is free, only requests whose deadlines have passed are dropped. The others run anyway, so that the
        latency model notices an engine that has become faster.
        """
        if now_s < self.expiry_s:
            return
        busy = self.is_busy
        # A copy, because dropping a request changes the queue.
        for request in list(self.queue):
            start_by_s = self._start_by_s(request)
            if now_s >= (start_by_s if busy else max(start_by_s, request.deadline_s)):
                self._drop(request)
        self.expiry_s = min(map(self._start_by_s, self.queue), default=math.inf)

    def _free(self, batch: RequestBatch, now_s: float) -> None:
        # Requests expire while the slot still counts as busy, so those that can only be late are dropped, too.
        self.expire(now_s)
        del self._running[batch]

    def _retry(self, now_s: float) -> RequestBatch | None:
        """Return a half of a failed call, without late requests and those that nobody waits for."""
        while self._retries:
            batch = self._retries.popleft()
            # The failed call has taken time, so some of its requests may be late by now.
            for part in batch.parts:
                if part.request.deadline_s <= now_s:
                    self._drop(part.request)
            parts = [part for part in batch.parts if part.request.deadline_s > now_s and not part.request.answer.done()]
            if parts:
                return RequestBatch(batch.group, parts, ReleaseReason.RETRY)
        return None

    def _release(self, now_s: float) -> RequestBatch | Hold | None:
        """Take waiting requests into a call, after dropping cancelled ones and those that are given up."""
        while (group := self.queue.next()) is not None:
            group.arrivals.slot_free(now_s)
            chosen = release(group, self._policy, now_s, self._hold_until_s(group, now_s))
            if isinstance(chosen, GiveUp):
                for request in chosen.requests:
                    self._drop(request)
            elif isinstance(chosen, Hold):
                return chosen
            # Then choose again: without them, other requests may fit, or a hold may pay.
            elif gone := [part.request for part in chosen.parts if part.request.answer.done()]:
                for request in gone:  # cancelled in this turn of the loop
                    self.remove(request)
            else:
                for part in chosen.parts:
                    # A split request has waited until its first call. Its later calls do not count as waiting.
                    if part.start == 0:
                        part.request.queue_s = now_s - part.request.arrived_s
                    self.queue.take(part.request, part.rows)
                return chosen
        return None

    def _hold_until_s(self, group: Group, now_s: float) -> float:
        """Return the time until which a slot may be kept idle for a group; -inf while other groups wait, too."""
        if self.closing or not self._policy.max_queue_delay_s or group.requests < self.queue.requests:
            return -math.inf
        return (now_s if self._held_s is None else self._held_s) + self._policy.max_queue_delay_s

    def _start_by_s(self, request: QueuedRequest) -> float:
        """Return the latest time at which the first call for this request can start, if the request runs alone.

        A request that has begun has no such time: it is answered even if it is late.
        """
        if request.scheduled:
            return math.inf
        return request.deadline_s - request.group.latency.seconds_in_calls(request.rows, request.group.max_rows)

    def _drop(self, request: QueuedRequest) -> None:
        self.remove(request)
        self.late.append(request)
