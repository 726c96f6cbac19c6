"""Requests that wait for the engine."""

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from app.errors import DeadlineError
from app.serving.batching.arrivals import Arrivals
from app.serving.batching.latency import LatencyModel
from app.serving.batching.policy import BatchingPolicy
from app.serving.batching.rows import join
from app.serving.batching.statistics import ComputeTime
from app.tensors import Tensors

_MOST_GROUPS = 64
"""Shapes whose latency is remembered while no request of theirs waits."""


class Answer(Protocol):
    """Who waits for the answer of a request, such as a future. It is told on the event loop."""

    def done(self) -> bool:
        """Whether nobody waits any more; asked by any thread."""
        ...

    def set_result(self, outputs: Tensors, /) -> None:
        """Take the outputs of all rows; they may be views of the outputs of a whole call."""
        ...

    def set_exception(self, error: Exception, /) -> None:
        """Take the reason why there is no answer."""
        ...


@dataclass(slots=True)
class Collected:
    """What calls have given so far for a request that takes several of them."""

    missing: int
    """Rows."""
    outputs: dict[int, Tensors] = field(default_factory=dict)
    """By their first rows."""
    compute: ComputeTime = field(default_factory=ComputeTime)

    @property
    def is_complete(self) -> bool:
        """Whether no row is missing."""
        return not self.missing

    @property
    def joined(self) -> Tensors:
        """The outputs of all rows, in order."""
        return join([self.outputs[start] for start in sorted(self.outputs)])


@dataclass(slots=True, eq=False)
class Request:
    """One that was admitted. Times are in seconds of the batcher's clock."""

    tensors: Tensors
    rows: int
    level: int
    number: int
    arrived_s: float
    deadline_s: float
    group: "Group"
    answer: Answer
    taken: int = 0
    """Rows that calls were made of."""
    queue_s: float = 0.0
    collected: Collected | None = None
    """Of a request that takes several calls, once one has ended."""

    @property
    def waits(self) -> bool:
        """Whether some of its rows are in no call yet."""
        return self.taken < self.rows

    def collect(self, start: int, rows: int, outputs: Tensors) -> Tensors | None:
        """Keep the outputs of the rows from ``start`` on. Return the outputs of all rows once they are complete."""
        if rows == self.rows:
            return outputs
        if self.collected is None:
            self.collected = Collected(self.rows)
        self.collected.outputs[start] = outputs
        self.collected.missing -= rows
        return self.collected.joined if self.collected.is_complete else None

    def late(self, now_s: float) -> DeadlineError:
        """Return the error of a request that cannot be answered in time."""
        waited_s, allowed_s = now_s - self.arrived_s, self.deadline_s - self.arrived_s
        return DeadlineError(
            f"the request waited for {waited_s:.3g} s and cannot be answered within {allowed_s:.3g} s of its arrival: "
            "try again later, or allow more time"
        )


class Group:
    """The requests of one shape, which can be joined."""

    def __init__(self, policy: BatchingPolicy, max_rows: int) -> None:
        self.max_rows = max_rows
        """The maximum rows of a call."""
        self.rows = 0
        """Rows of waiting requests that are in no call yet."""
        self.latency = LatencyModel()
        self.arrivals = Arrivals(longest_s=4 * policy.max_queue_delay_s)
        self.levels: list[deque[Request]] = [deque() for _ in range(policy.priority_levels)]

    def __iter__(self) -> Iterator[Request]:
        """What waits: the most urgent first, and the oldest of these."""
        for level in self.levels:
            yield from level

    @property
    def head(self) -> Request | None:
        """What is next."""
        return next(iter(self), None)

    @property
    def requests(self) -> int:
        """How many wait."""
        return sum(map(len, self.levels))


class WaitingQueue:
    """Requests by shape, level and arrival."""

    def __init__(self, policy: BatchingPolicy) -> None:
        self._policy = policy
        self._groups: dict[Hashable, Group] = {}
        self.requests = 0

    def __iter__(self) -> Iterator[Request]:
        for group in self._groups.values():
            yield from group

    def seconds(self, latency: LatencyModel) -> float:
        """Return the time that all waiting rows take in consecutive calls."""
        return sum(latency.seconds_in_calls(group.rows, group.max_rows) for group in self._groups.values())

    def group(self, shape: Hashable, tensors: Tensors) -> Group:
        """Return the group of a shape, which is that of ``tensors``. Create the group if it is new."""
        if (group := self._groups.get(shape)) is None:
            if len(self._groups) >= _MOST_GROUPS:
                self._forget()
            group = self._groups[shape] = Group(self._policy, self._policy.max_rows(tensors))
        return group

    def put(self, request: Request) -> None:
        """Add a request as the last of its level."""
        request.group.levels[request.level - 1].append(request)
        self.requests += 1
        request.group.rows += request.rows

    def take(self, request: Request, rows: int) -> None:
        """Give some rows of a request to a call; with the last of them it waits no more."""
        request.taken += rows
        request.group.rows -= rows
        if not request.waits:
            self._leave(request)

    def remove(self, request: Request) -> None:
        """Forget a request, if it still waits."""
        if request.waits:
            self.take(request, request.rows - request.taken)

    def next(self) -> Group | None:
        """The group of the oldest among the most urgent requests; None if nothing waits."""
        heads = [head for group in self._groups.values() if (head := group.head)] if self.requests else []
        return min(heads, key=lambda head: (head.level, head.number)).group if heads else None

    def _leave(self, request: Request) -> None:
        level = request.group.levels[request.level - 1]
        if level[0] is request:
            level.popleft()
        else:
            level.remove(request)
        self.requests -= 1

    def _forget(self) -> None:
        """Drop the shape that was new longest ago, of those that none waits of."""
        for shape, group in self._groups.items():
            if group.head is None:
                del self._groups[shape]
                return
