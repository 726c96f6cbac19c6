"""What a served language model counts of its requests."""

import asyncio

import pytest

from app.engines.generation.base import RefusedError
from app.errors import DeadlineError, EngineError, OverloadError, RequestError
from app.serving.batching.statistics import FailureReason
from app.serving.generation.statistics import RequestTimer, StreamStatistics


class Clock:
    """A clock that is set by hand."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_time_of_a_request_is_split_at_its_start_and_its_first_token() -> None:
    counted, clock = StreamStatistics(), Clock()
    timer = RequestTimer(counted, clock)
    clock.now_s += 2
    timer.started(prompt_tokens=7)
    clock.now_s += 1
    timer.received(0, 1)
    clock.now_s += 0.5
    timer.received(1, 1)  # the first token of another answer has none before it
    timer.received(0, 2)
    timer.finished("stop")
    timer.finished("length")
    timer.answered()
    timer.failed(asyncio.CancelledError())  # it has ended already
    assert (counted.prompt_tokens, counted.generated_tokens) == (7, 4)
    assert [part.ns / 1e9 for part in (counted.success, counted.queue, counted.prefill, counted.decode)] == [
        3.5, 2.0, 1.0, 0.5,
    ]  # fmt: skip
    assert (sum(counted.between_tokens_s.counts), counted.between_tokens_s.total) == (2, 0.5)
    assert (sum(counted.first_token_s.counts), counted.first_token_s.total) == (1, 3.0)
    assert counted.finishes == {"stop": 1, "length": 1}
    assert not counted.failures


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OverloadError("full"), FailureReason.REJECTED),
        (DeadlineError("late"), FailureReason.DEADLINE),
        (asyncio.CancelledError(), FailureReason.CANCELLED),
        (GeneratorExit(), FailureReason.CANCELLED),
        (EngineError("died"), FailureReason.ENGINE),
    ],
)
def test_a_failed_request_counts_once_by_its_reason(error: BaseException, reason: FailureReason) -> None:
    counted = StreamStatistics()
    timer = RequestTimer(counted)
    timer.failed(error)
    timer.answered()
    assert counted.failures == {reason: 1}
    assert (counted.fail.count, counted.success.count) == (1, 0)


@pytest.mark.parametrize("error", [RequestError("too long"), RefusedError("a schema")])
def test_a_mistake_of_the_client_is_no_failure(error: Exception) -> None:
    counted = StreamStatistics()
    RequestTimer(counted).failed(error)
    assert (counted.invalid, counted.fail.count, counted.failures) == (1, 0, {})
