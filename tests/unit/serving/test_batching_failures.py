"""Errors, clients that go away, overload, and what is counted."""

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest

from app.errors import DeadlineError, OverloadError
from app.serving.batching.batcher import Batcher
from app.serving.batching.scheduler import BatchingPolicy, RowsByLength
from app.serving.batching.statistics import BatchingStatistics, ComputeDurations
from app.tensors import Tensors
from tests.virtual_engine import Answered, VirtualEngine, VirtualLoop, ask, row, run
from tests.wording import refused


async def _at_once(engine: VirtualEngine, values: list[float]) -> tuple[list[Answered], BatchingStatistics]:
    batcher = engine.batcher(max_batch_size=8)
    answers = await asyncio.gather(*(ask(batcher, 0.0, row(value)) for value in values))
    await batcher.close()
    return answers, batcher.statistics


def test_a_bad_request_does_not_spoil_the_call_that_it_is_in() -> None:
    engine = VirtualEngine(call_s=0.1)
    answers, statistics = run(_at_once(engine, [0, 1, 2, -3, 4, 5, 6, 7]))
    assert [answer.values for answer in answers] == [[0], [2], [4], None, [8], [10], [12], [14]]
    assert isinstance(answers[3].error, FloatingPointError)
    assert engine.sizes == [8, 4, 4, 2, 2, 1, 1]
    assert statistics.releases == {"full": 1, "retry": 6}
    assert statistics.failures == {"engine": 1}


def test_an_engine_that_always_fails_fails_each_request() -> None:
    engine = VirtualEngine(call_s=0.1)
    answers, statistics = run(_at_once(engine, [-1, -2, -3]))
    assert [str(answer.error) for answer in answers] == [f"{value:.1f} is negative" for value in (-1, -2, -3)]
    assert statistics.executions == 0


def test_what_runs_again_leaves_out_who_went_away_and_who_is_late() -> None:
    async def scenario() -> list[Answered]:
        batcher = engine.batcher(max_batch_size=8)
        gone = asyncio.create_task(ask(batcher, 0.0, row(1)))
        rest = [ask(batcher, 0.0, row(2)), ask(batcher, 0.0, row(-3), timeout_s=0.05), ask(batcher, 0.0, row(4))]
        asyncio.get_running_loop().call_at(0.05, gone.cancel)
        answers = await asyncio.gather(*rest)
        await batcher.close()
        return answers

    engine = VirtualEngine(call_s=0.1)
    answers = run(scenario())
    assert engine.calls == [[1, 2, -3, 4], [2], [4]]
    assert isinstance(answers[1].error, DeadlineError)


def test_a_request_of_several_calls_fails_as_a_whole() -> None:
    async def scenario() -> Answered:
        batcher = engine.batcher(max_batch_size=2)
        answer = await ask(batcher, 0.0, {"x": np.array([[1.0], [2.0], [-3.0], [4.0], [5.0], [6.0]])})
        await batcher.close()
        return answer

    engine = VirtualEngine(call_s=0.1)
    assert isinstance(run(scenario()).error, FloatingPointError)
    assert engine.calls == [[1, 2], [-3, 4]], "the rest is not run"


@pytest.mark.parametrize("outputs", [{"y": np.zeros((3, 1))}, {"y": np.float32(0)}])
def test_an_answer_of_other_rows_is_an_error(outputs: Tensors) -> None:
    async def scenario() -> None:
        batcher = Batcher(lambda _: outputs, BatchingPolicy(max_batch_size=4))
        with refused("engine.rows"):
            await batcher.infer(row(1))
        await batcher.close()

    asyncio.run(scenario())


def test_who_goes_away_gives_the_place_free_and_is_not_run() -> None:
    async def scenario() -> None:
        batcher = engine.batcher(max_batch_size=8, queue_limit=1)
        loop = asyncio.get_running_loop()
        running, waiting = (asyncio.create_task(ask(batcher, at_s, row(at_s))) for at_s in (0.0, 0.1))
        await asyncio.sleep(0.2)
        waiting.cancel()
        await asyncio.sleep(0)
        assert batcher.waiting == 0
        assert (await ask(batcher, loop.time(), row(3))).values == [6]
        assert (await running).values == [0]
        assert batcher.statistics.failures == {"cancelled": 1}

    engine = VirtualEngine(call_s=0.3)
    run(scenario())
    assert engine.calls == [[0], [3]]


def test_who_goes_away_in_the_turn_in_which_a_call_starts_is_not_run() -> None:
    async def scenario() -> None:
        batcher = engine.batcher(max_batch_size=8)
        tasks = [asyncio.create_task(batcher.infer(row(number))) for number in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(done[1], asyncio.CancelledError)

    engine = VirtualEngine(call_s=0.1)
    run(scenario())
    assert engine.calls == [[0, 2]]


async def _overloaded(engine: VirtualEngine, warm: bool, **knobs: Any) -> tuple[OverloadError, Batcher]:
    """Queue 16 rows, which are two calls of 8, behind a call with 0.06 s left, and send one request too many."""
    batcher = engine.batcher(max_batch_size=8, queue_limit=16, **knobs)
    for rows in (1, 8) if warm else ():
        await batcher.infer(row(0, rows=rows))
    start_s = asyncio.get_running_loop().time()
    times = [0.0] + [0.05] * 17
    answers = await asyncio.gather(*(ask(batcher, start_s + at_s, row(0)) for at_s in times))
    (refused,) = (answer for answer in answers if answer.error)
    assert isinstance(refused.error, OverloadError)
    assert refused.at_s == round(start_s + 0.05, 6), "at once"
    return refused.error, batcher


def test_beyond_the_queue_a_request_is_told_when_to_come_back() -> None:
    error, batcher = run(_overloaded(VirtualEngine(call_s=0.1, row_s=0.01), warm=True))
    assert error.retry_after_s == pytest.approx(0.06 + 2 * 0.18)
    assert "16 requests wait already: try again in 0.42 s" in str(error)
    assert batcher.statistics.failures == {"rejected": 1}
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.retry_after_s) == (str(error), error.retry_after_s)


def test_the_retry_delay_depends_on_the_maximum_rows_at_a_length() -> None:
    by_length = RowsByLength("x", 1, ((1, 4),))
    error, _ = run(_overloaded(VirtualEngine(call_s=0.1, row_s=0.01), warm=True, by_length=by_length))
    assert error.retry_after_s == pytest.approx(0.06 + 4 * 0.14)


@pytest.mark.parametrize(("by_length", "sizes"), [(None, [4, 2]), (RowsByLength("x", 1, ((1, 2), (2, 4))), [2, 2])])
def test_requests_that_a_free_slot_is_about_to_take_do_not_fill_the_queue(
    by_length: RowsByLength | None, sizes: list[int]
) -> None:
    engine = VirtualEngine(call_s=0.1)

    async def scenario() -> list[Answered]:
        batcher = engine.batcher(max_batch_size=4, queue_limit=2, by_length=by_length)
        answers = await asyncio.gather(*(ask(batcher, 0.0, row(value)) for value in range(7)))
        await batcher.close()
        return answers

    answers = run(scenario())
    assert engine.sizes == sizes
    answered = sum(sizes)
    assert [type(answer.error) for answer in answers] == [type(None)] * answered + [OverloadError] * (7 - answered)


def test_an_engine_that_is_not_measured_yet_asks_to_come_back_in_a_second() -> None:
    error, _ = run(_overloaded(VirtualEngine(call_s=0.1, row_s=0.01), warm=False))
    assert error.retry_after_s == 1.0


def counts_and_ns(durations: ComputeDurations) -> list[tuple[int, int]]:
    """Return count and nanoseconds of input, inference and output."""
    return [(part.count, part.ns) for part in (durations.input, durations.infer, durations.output)]


def test_what_is_counted() -> None:
    async def scenario() -> BatchingStatistics:
        batcher = engine.batcher(max_batch_size=4)
        await asyncio.gather(*(ask(batcher, at_s, row(1, rows=2)) for at_s in (0.0, 0.05, 0.05, 0.05)))
        await batcher.close()
        return batcher.statistics

    engine = VirtualEngine(call_s=0.1, input_s=0.01, output_s=0.02)
    counted = run(scenario())
    assert counted.inferences == 8
    assert counted.executions == 3
    assert counted.success.count == counted.queue.count == 4
    assert counted.queue.ns == pytest.approx(2 * 5e7 + 1.5e8, abs=10)
    assert counts_and_ns(counted.compute) == [(4, 4e7), (4, 28e7), (4, 8e7)], "each request has the times of its call"
    assert counted.success.ns == pytest.approx(counted.queue.ns + 4e8, abs=10)
    assert counts_and_ns(counted.batches[2]) == [(2, 2e7), (2, 14e7), (2, 4e7)]
    assert counts_and_ns(counted.batches[4]) == [(1, 1e7), (1, 7e7), (1, 2e7)]
    assert counted.fail.count == 0


class _Written:
    """An answer that takes 1 s to write to its client."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.outputs: Tensors | None = None

    def done(self) -> bool:
        return self.outputs is not None

    def set_result(self, outputs: Tensors, /) -> None:
        self._loop.pass_time(1.0)
        self.outputs = outputs

    def set_exception(self, error: Exception, /) -> None:
        raise error


def test_the_time_to_write_answers_is_not_counted() -> None:
    async def scenario() -> BatchingStatistics:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        batcher, answers = engine.batcher(max_batch_size=4), [_Written(loop) for _ in range(4)]
        for value, answer in enumerate(answers):
            batcher.submit(row(value), 1, "x", answer)
        await batcher.close()
        assert [answer.outputs["twice"][0, 0] for answer in answers if answer.outputs] == [0, 2, 4, 6]
        assert loop.time() == pytest.approx(4.1)
        return batcher.statistics

    engine = VirtualEngine(call_s=0.1, output_s=0.02)
    counted = run(scenario())
    assert counted.success.count == 4
    assert counted.success.ns == pytest.approx(4e8, abs=10)
    assert counts_and_ns(counted.compute)[2] == (4, 8e7)
    assert counts_and_ns(counted.batches[4])[2] == (1, 2e7)


def test_closing_answers_what_waits_and_takes_nothing_new() -> None:
    async def scenario() -> tuple[list[Answered], float]:
        batcher = engine.batcher(max_batch_size=2)
        tasks = [asyncio.create_task(ask(batcher, 0.0, row(number))) for number in range(5)]
        await asyncio.sleep(0.01)
        closing = [asyncio.create_task(batcher.close()) for _ in range(2)]
        refused = await ask(batcher, 0.02, row(9))
        assert isinstance(refused.error, OverloadError)
        await asyncio.gather(*closing)
        closed_s = asyncio.get_running_loop().time()
        return await asyncio.gather(*tasks), closed_s

    engine = VirtualEngine(call_s=0.1)
    answers, closed_s = run(scenario())
    assert [answer.values for answer in answers] == [[2 * number] for number in range(5)]
    assert closed_s == pytest.approx(0.3)
