"""The queue in front of a language model, bounded in tokens of prompts and of promised answers."""

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from app.errors import DeadlineError, OverloadError, RequestError
from app.serving.generation.policy import GenerationPolicy

_WINDOW_S = 30.0
"""Seconds over which the rate of tokens is measured."""
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 600.0


class TokenRate:
    """The recent rate at which a model works off tokens, per second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counted: deque[tuple[float, int]] = deque()
        self._tokens = 0
        self._since_s: float | None = None

    def add(self, tokens: int) -> None:
        """Count tokens that are worked off."""
        now_s = self._clock()
        self._forget(now_s)
        if self._since_s is None:
            self._since_s = now_s
        # A long answer has many tokens, and one entry per second is enough.
        if self._counted and now_s - self._counted[-1][0] < 1.0:
            last_s, counted = self._counted[-1]
            self._counted[-1] = (last_s, counted + tokens)
        else:
            self._counted.append((now_s, tokens))
        self._tokens += tokens

    @property
    def per_second(self) -> float | None:
        """The rate within the last 30 seconds; None before the first second of work."""
        now_s = self._clock()
        self._forget(now_s)
        if self._since_s is None or not self._tokens:
            return None
        seconds = min(_WINDOW_S, now_s - self._since_s)
        return self._tokens / seconds if seconds >= 1.0 else None

    def _forget(self, now_s: float) -> None:
        while self._counted and self._counted[0][0] < now_s - _WINDOW_S:
            self._tokens -= self._counted.popleft()[1]
        if not self._counted:
            self._since_s = None


@dataclass(order=True)
class Ticket:
    """The place of one answer in the queue. Tickets are ordered by urgency."""

    level: int
    deadline_s: float
    place: int
    number: int
    tokens: int = field(compare=False)
    """Tokens that it may take: its promised tokens, and those of its prompt that no other ticket counts."""
    left: int = field(compare=False)
    """Tokens that are not worked off."""
    arrived_s: float = field(compare=False)
    turn: asyncio.Future[None] | None = field(default=None, compare=False)
    """Set while the ticket waits."""
    is_running: bool = field(default=False, compare=False)

    @property
    def has_gone(self) -> bool:
        """Whether the request no longer waits for its turn."""
        return self.turn is None or self.turn.cancelled()


class Admission:
    """Lets a bounded number of answers run at a time, and a bounded number of tokens wait.

    Tickets run in the order of their level, then deadline, then arrival. Each further answer to a request is placed
    behind the next ``max_streams`` arrivals, so a request for many answers does not delay others.
    """

    def __init__(self, policy: GenerationPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy, self._clock = policy, clock
        self.rate = TokenRate(clock)
        """Tokens that are worked off: read, generated, or promised but not needed."""
        self._queue: list[Ticket] = []  # a heap
        self._places, self._numbers = count(), count()
        self._is_closed = False
        self._admitted = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.running = 0
        """Answers that run."""
        self.waiting = 0
        """Answers that wait."""
        self.waiting_tokens = 0
        """Tokens of their prompts and promises."""

    def admit(
        self, prompt_tokens: int, max_tokens: int, answers: int, level: int, deadline_s: float = math.inf
    ) -> list[Ticket]:
        """Return a ticket for each answer to a request. Each must be used in ``turn``, or given back by ``leave``.

        Args:
            deadline_s: time by which the answers are due, on the clock ``time.monotonic``.

        Raises:
            RequestError: it would not even fit in an empty queue.
            OverloadError: it does not fit in the queue, or the queue is closed.
        """
        if self._is_closed:
            raise OverloadError("the model is being unloaded: try again").of("queue.closed")
        place = next(self._places)
        tickets = [
            self._ticket(index, place, max_tokens + (0 if index else prompt_tokens), level, deadline_s)
            for index in range(answers)
        ]
        self._require_possible(tickets[self._policy.max_streams :])
        # Those that can start at once do not wait.
        free = 0 if self.waiting else self._policy.max_streams - self.running
        self._require_room(tickets[max(0, free) :])
        self._admitted += answers
        self._is_empty.clear()
        for ticket in tickets:
            self._enqueue(ticket)
        self._start_next()
        return tickets

    def _ticket(self, index: int, place: int, tokens: int, level: int, deadline_s: float) -> Ticket:
        return Ticket(
            level=level,
            deadline_s=deadline_s,
            place=place + index * self._policy.max_streams,
            number=next(self._numbers),
            tokens=tokens,
            left=tokens,
            arrived_s=self._clock(),
        )

    def _require_possible(self, tickets: list[Ticket]) -> None:
        """Raise RequestError if these tickets, which must wait, exceed even an empty queue."""
        policy, tokens = self._policy, sum(ticket.tokens for ticket in tickets)
        if tokens > policy.queue_tokens or len(tickets) > policy.queue_limit:
            raise RequestError(
                f"{policy.max_streams} answers are generated at a time, and the {len(tickets)} further ones may take "
                f"{tokens} tokens: the queue takes {policy.queue_limit} answers and {policy.queue_tokens} tokens; ask "
                "for fewer or shorter answers"
            ).of("queue.too_small", "n")

    def _require_room(self, tickets: list[Ticket]) -> None:
        """Raise OverloadError unless these tickets may wait."""
        policy, tokens = self._policy, sum(ticket.tokens for ticket in tickets)
        excess = self.waiting_tokens + tokens - policy.queue_tokens
        if not tickets or (excess <= 0 and self.waiting + len(tickets) <= policy.queue_limit):
            return
        retry_after_s = self._retry_after_s(max(excess, 0))
        if excess > 0:
            held = (
                f"{self.waiting_tokens} tokens wait, this request may take {tokens} more, and at most "
                f"{policy.queue_tokens} may wait"
            )
        else:
            held = (
                f"{self.waiting} answers wait, this request has {len(tickets)} more, and at most {policy.queue_limit} "
                "may wait"
            )
        raise OverloadError(
            f"{held}: try again in {retry_after_s:.0f} s, or ask for shorter answers", retry_after_s
        ).of("queue.full")

    def _retry_after_s(self, excess: int) -> float:
        """Return the seconds until so many tokens have left the queue, at the recent rate."""
        rate = self.rate.per_second
        # Tickets leave the queue as running answers end.
        seconds = excess / rate if rate else _MIN_RETRY_S
        return float(math.ceil(min(_MAX_RETRY_S, max(_MIN_RETRY_S, seconds))))

    def _enqueue(self, ticket: Ticket) -> None:
        ticket.turn = asyncio.get_running_loop().create_future()
        self.waiting += 1
        self.waiting_tokens += ticket.tokens
        heapq.heappush(self._queue, ticket)

    @asynccontextmanager
    async def turn(self, ticket: Ticket) -> AsyncIterator[None]:
        """Wait for the ticket's turn, and let an answer run within the block.

        Raises:
            DeadlineError: the deadline passed before.
        """
        try:
            await self._wait(ticket)
            yield
        finally:
            self.leave(ticket)

    async def _wait(self, ticket: Ticket) -> None:
        assert ticket.turn is not None
        left_s = None if ticket.deadline_s == math.inf else max(0.0, ticket.deadline_s - self._clock())
        try:
            async with asyncio.timeout(left_s):
                await ticket.turn
        except TimeoutError:
            raise DeadlineError(
                f"the request waited for {self._clock() - ticket.arrived_s:.3g} s until its deadline: try again later, "
                "or allow more time"
            ).of("deadline.queue") from None

    def worked_off(self, ticket: Ticket, tokens: int) -> None:
        """Count tokens that a running answer has read or generated."""
        tokens = min(tokens, ticket.left)
        ticket.left -= tokens
        self.rate.add(tokens)

    def leave(self, ticket: Ticket) -> None:
        """Give the ticket back: its answer has ended, or will not start. Giving it back twice changes nothing."""
        turn, ticket.turn = ticket.turn, None
        if turn is None:
            return
        if ticket.is_running:
            ticket.is_running = False
            self.running -= 1
            self.rate.add(ticket.left)
        else:
            self._unqueue(ticket)
            turn.cancel()
            # Otherwise, the queue would keep all abandoned tickets behind a long answer.
            if ticket in self._queue:
                self._queue.remove(ticket)
                heapq.heapify(self._queue)
        self._admitted -= 1
        if not self._admitted:
            self._is_empty.set()
        self._start_next()

    def _unqueue(self, ticket: Ticket) -> None:
        self.waiting -= 1
        self.waiting_tokens -= ticket.tokens

    def _start_next(self) -> None:
        while self._queue and (self._queue[0].has_gone or self.running < self._policy.max_streams):
            ticket = heapq.heappop(self._queue)
            if ticket.turn is None or ticket.has_gone:
                continue
            self._unqueue(ticket)
            self.running += 1
            ticket.is_running = True
            ticket.turn.set_result(None)

    async def close(self, timeout_s: float) -> None:
        """Stop admitting, and wait until all admitted answers have ended or the time is up."""
        self._is_closed = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        except TimeoutError:
            pass
