"""The queue in tokens, with a clock of the test."""

import asyncio
import math
import time
import weakref
from collections.abc import Sequence

import pytest

from app.errors import DeadlineError, OverloadError, RequestError
from app.serving.generation.admission import Admission, Ticket
from app.serving.generation.policy import GenerationPolicy
from tests.helpers import on_loop


class Clock:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Answers:
    """Answers that run until they are released, in the order in which they started."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.started: list[str] = []
        self._release: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def add(self, name: str, tickets: Sequence[Ticket]) -> None:
        for index, ticket in enumerate(tickets):
            one = f"{name}{index}" if len(tickets) > 1 else name
            self.tasks[one] = asyncio.create_task(self._run(one, ticket))

    async def _run(self, name: str, ticket: Ticket) -> None:
        self._release[name] = asyncio.Event()
        async with self._admission.turn(ticket):
            self.started.append(name)
            await self._release[name].wait()

    def release(self, name: str) -> None:
        self._release[name].set()

    async def finish(self, name: str) -> None:
        self.release(name)
        await self.tasks[name]
        await settled()

    async def finish_all(self) -> list[str]:
        """Finish what has started, until nothing starts any more."""
        await settled()
        for name in self.started:  # which grows
            await self.finish(name)
        return self.started


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def queue(clock: Clock | None = None, **bounds: int) -> Admission:
    return Admission(GenerationPolicy(**{"max_streams": 1, "priority_levels": 3, **bounds}), clock or Clock())


@on_loop
async def test_answers_run_by_priority_then_deadline_then_arrival() -> None:
    admission = queue()
    answers = Answers(admission)
    for name, level, deadline_s in [
        ("first", 2, math.inf), ("late", 2, math.inf), ("hasty", 2, 50.0), ("hastier", 2, 40.0),
        ("urgent", 1, math.inf), ("idle", 3, 1.0), ("later", 2, math.inf),
    ]:  # fmt: skip
        answers.add(name, admission.admit(1, 1, 1, level, deadline_s))
    assert await answers.finish_all() == ["first", "urgent", "hastier", "hasty", "late", "later", "idle"]
    assert (admission.running, admission.waiting, admission.waiting_tokens) == (0, 0, 0)


@on_loop
async def test_a_request_for_many_answers_lets_others_pass_but_not_for_ever() -> None:
    admission = queue(max_streams=2)
    answers = Answers(admission)
    answers.add("many", admission.admit(1, 1, 6, 1))
    for index in range(5):
        answers.add(f"one{index}", admission.admit(1, 1, 1, 1))
    await settled()
    assert answers.started == ["many0", "many1"]
    order = await answers.finish_all()
    # Its answers go on behind the next two, four, six … arrivals.
    assert order == ["many0", "many1", "one0", "one1", "one2", "many2", "one3", "one4", "many3", "many4", "many5"]


@on_loop
async def test_tokens_that_wait_are_bounded_and_the_refusal_says_when_to_try_again() -> None:
    clock = Clock()
    admission = queue(clock, queue_tokens=100)
    answers = Answers(admission)
    # What runs at once does not wait, however large it is.
    answers.add("large", large := admission.admit(500, 500, 1, 1))
    answers.add("a", admission.admit(20, 40, 1, 1))
    with pytest.raises(OverloadError, match="60 tokens wait, this request may take 50 more, and at most 100") as caught:
        admission.admit(10, 40, 1, 1)
    assert caught.value.retry_after_s == 1.0  # nothing is measured yet
    admission.worked_off(large[0], 10)
    clock.now_s = 5.0
    admission.worked_off(large[0], 10)
    # 10 tokens are too many, at 20 in 5 s. Of 1,000 it is the maximum.
    with pytest.raises(OverloadError, match="try again in 3 s") as caught:
        admission.admit(10, 40, 1, 1)
    assert caught.value.retry_after_s == 3.0
    with pytest.raises(OverloadError) as caught:
        admission.admit(10, 100_000, 1, 1)
    assert caught.value.retry_after_s == 600.0
    # An answer that ends early frees all that it had promised.
    answers.add("b", admission.admit(20, 20, 1, 1))
    await settled()
    clock.now_s = 10.0
    await answers.finish("large")
    assert admission.rate.per_second == 100.0
    assert admission.waiting_tokens == 40
    clock.now_s = 1000.0
    assert admission.rate.per_second is None
    await answers.finish_all()


@on_loop
async def test_the_number_of_waiting_answers_is_bounded() -> None:
    admission = queue(queue_limit=2)
    for _ in range(3):
        admission.admit(1, 1, 1, 1)
    with pytest.raises(OverloadError, match="2 answers wait, this request has 1 more, and at most 2 may wait"):
        admission.admit(1, 1, 1, 1)


@on_loop
async def test_a_request_for_several_answers_does_not_exceed_the_bound() -> None:
    admission = queue(max_streams=4, queue_limit=3)
    for _ in range(6):
        admission.admit(1, 1, 1, 1)
    with pytest.raises(OverloadError, match="2 answers wait, this request has 2 more, and at most 3 may wait"):
        admission.admit(1, 1, 2, 1)
    assert admission.waiting == 2


@on_loop
async def test_the_queue_keeps_nothing_of_those_who_gave_up() -> None:
    admission = queue()
    admission.admit(1, 1, 1, 1)  # runs for long
    admission.admit(1, 1, 1, 1)  # waits in front of the others
    kept = []
    for _ in range(100):
        (ticket,) = admission.admit(1, 1, 1, level=3)
        kept.append(weakref.ref(ticket))
        admission.leave(ticket)
        del ticket
    assert not any(ticket() for ticket in kept)
    assert admission.waiting == 1


@on_loop
async def test_more_answers_than_an_empty_queue_takes_are_no_overload() -> None:
    for admission in (queue(queue_tokens=100), queue(queue_limit=2)):
        with pytest.raises(RequestError, match="at a time, and the 3 further ones may take 120 tokens"):
            admission.admit(10, 40, 4, 1)
        assert admission.waiting == admission.running == 0


@on_loop
async def test_who_gives_up_in_the_queue_leaves_his_place() -> None:
    admission = queue()
    answers = Answers(admission)
    for name in "abcd":
        answers.add(name, admission.admit(5, 5, 1, 1))
    await settled()
    answers.tasks["b"].cancel()
    await settled()
    assert (admission.waiting, admission.waiting_tokens) == (2, 20)
    # This one gives up as its turn comes.
    answers.release("a")
    answers.tasks["c"].cancel()
    assert await answers.finish_all() == ["a", "d"]
    assert (admission.running, admission.waiting, admission.waiting_tokens) == (0, 0, 0)
    # A ticket whose task never ran is given back.
    (running,), (waiting,) = admission.admit(5, 5, 1, 1), admission.admit(5, 5, 1, 1)
    admission.leave(waiting)
    admission.leave(running)
    admission.leave(running)
    assert (admission.running, admission.waiting) == (0, 0)


@on_loop
async def test_a_deadline_in_the_queue() -> None:
    admission = Admission(GenerationPolicy(max_streams=1))
    answers = Answers(admission)
    answers.add("a", admission.admit(1, 1, 1, 1))
    answers.add("late", admission.admit(1, 1, 1, 1, time.monotonic() + 0.05))
    with pytest.raises(DeadlineError, match=r"waited for \d[\d.]* s until its deadline"):
        await answers.tasks["late"]
    assert admission.waiting == 0
    assert await answers.finish_all() == ["a"]


@on_loop
async def test_closing_waits_for_what_was_admitted_and_takes_nothing_more() -> None:
    admission = queue()
    answers = Answers(admission)
    for name in "ab":
        answers.add(name, admission.admit(1, 1, 1, 1))
    closing = asyncio.create_task(admission.close(timeout_s=10))
    await settled()
    with pytest.raises(OverloadError, match="being unloaded"):
        admission.admit(1, 1, 1, 1)
    assert not closing.done()
    assert await answers.finish_all() == ["a", "b"]
    await closing


@on_loop
async def test_closing_is_bounded() -> None:
    admission = queue()
    admission.admit(1, 1, 1, 1)
    async with asyncio.timeout(30):
        await admission.close(timeout_s=0.05)
