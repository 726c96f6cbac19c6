"""Errors, clients that go away, overload, what is counted, and the engine's threads."""

import asyncio
import math
import pickle
import random
import threading
import time
from typing import Any

import numpy as np
import pytest

from app.errors import DeadlineError, EngineError, OverloadError
from app.serving.batching.batcher import Batcher
from app.serving.batching.groups import BatchingPolicy, RowsByLength
from app.serving.batching.release import Hold, RequestBatch
from app.serving.batching.statistics import BatchingStatistics, ComputeDurations
from app.serving.batching.threads import CallResult, EngineThreads
from app.tensors import Tensors
from tests.virtual_engine import Answered, VirtualEngine, VirtualLoop, ask, row, run


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


@pytest.mark.parametrize(
    ("outputs", "told"),
    [({"y": np.zeros((3, 1))}, r"'y' has shape \[3, 1\] for 1 rows"), ({"y": np.float32(0)}, "shape")],
)
def test_an_answer_of_other_rows_is_an_error(outputs: Tensors, told: str) -> None:
    async def scenario() -> None:
        batcher = Batcher(lambda _: outputs, BatchingPolicy(max_batch_size=4))
        with pytest.raises(EngineError, match=told):
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


def test_closing_an_idle_batcher_ends_its_threads() -> None:
    async def scenario() -> list[threading.Thread]:
        before = set(threading.enumerate())
        batcher = Batcher(dict, BatchingPolicy(max_batch_size=1), slots=2)
        threads = [thread for thread in threading.enumerate() if thread not in before]
        await batcher.close()
        return threads

    threads = asyncio.run(scenario())
    assert len(threads) == 2
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()


class _Asked:
    """Has no calls. It lets the first who asks wait, and everybody after it ask again in 50 ms."""

    def __init__(self) -> None:
        self.free, self.done = threading.Event(), threading.Event()
        self.times_s: list[float] = []

    def next(self) -> Hold:
        assert self.free.wait(10)
        self.times_s.append(time.monotonic())
        if len(self.times_s) == 3:
            self.done.set()
        return Hold(time.monotonic() + 0.05)

    def ended(self, batch: RequestBatch, outcome: CallResult) -> None:
        raise AssertionError(batch, outcome)


def test_a_busy_thread_that_is_woken_many_times_asks_once_and_ends_before_its_slots_are_closed() -> None:
    calls, others = _Asked(), {*threading.enumerate()}
    threads = EngineThreads(calls, dict, lambda _: None, slots=1)
    for _ in range(1000):
        threads.wake()
    calls.free.set()
    assert calls.done.wait(10)
    asyncio.run(threads.close())
    assert not {thread for thread in threading.enumerate() if thread.name == "engine-0"} - others
    _, second_s, third_s = calls.times_s[:3]
    assert third_s - second_s > 0.04


def test_each_slot_runs_in_a_thread_and_the_loop_goes_on() -> None:
    """Two calls meet at a barrier, which opens for the third party only: the event loop."""
    barrier = threading.Barrier(3, timeout=10)

    def infer(tensors: Tensors) -> Tensors:
        barrier.wait()
        return {"twice": 2 * tensors["x"]}

    async def scenario() -> list[Tensors]:
        batcher = Batcher(infer, BatchingPolicy(max_batch_size=1), slots=2)
        tasks = [asyncio.create_task(batcher.infer(row(number))) for number in range(2)]
        while barrier.n_waiting < 2:
            await asyncio.sleep(0)
        barrier.wait()
        answers = await asyncio.gather(*tasks)
        await batcher.close()
        return answers

    answers = asyncio.run(scenario())
    assert [float(answer["twice"][0, 0]) for answer in answers] == [0, 2]


@pytest.mark.parametrize("error", [EngineError("the engine is closed"), StopIteration(), SystemExit(1)])
def test_whatever_the_engine_raises_reaches_who_asked_and_the_thread_lives_on(error: BaseException) -> None:
    def infer(tensors: Tensors) -> Tensors:
        if (tensors["x"] < 0).any():
            raise error
        return tensors

    async def scenario() -> None:
        batcher = Batcher(infer, BatchingPolicy(max_batch_size=4))
        (failed,) = await asyncio.gather(batcher.infer(row(-1)), return_exceptions=True)
        assert isinstance(failed, type(error) | EngineError)
        assert (await batcher.infer(row(1)))["x"] == 1
        await batcher.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("expected_s", [0.0, 1e-3])
def test_short_calls_run_on_the_loop_and_all_others_in_a_thread(expected_s: float) -> None:
    async def scenario() -> list[str]:
        ran_in: list[str] = []

        def infer(tensors: Tensors) -> Tensors:
            ran_in.append(threading.current_thread().name)
            time.sleep(expected_s)
            return tensors

        batcher = Batcher(infer, BatchingPolicy(max_batch_size=1), max_on_loop_s=5e-4 if expected_s else 1.0)
        for value in range(3):
            assert (await batcher.infer(row(value)))["x"] == value
        assert await asyncio.gather(*(batcher.infer(row(value)) for value in range(3))) == [row(0), row(1), row(2)]
        await batcher.close()
        assert batcher.statistics.executions == 6
        return ran_in

    loop = threading.current_thread().name
    assert asyncio.run(scenario()) == ["engine-0", *["engine-0" if expected_s else loop] * 5]


@pytest.mark.parametrize("max_on_loop_s", [0.0, 3e-5, math.inf])
@pytest.mark.parametrize("slots", [1, 3])
def test_the_loop_and_threads_that_take_calls_answer_everybody_once(slots: int, max_on_loop_s: float) -> None:
    """Clients that come, leave, run late and send bad rows while calls are taken: nothing is lost or mixed up."""
    rng = random.Random(slots)

    def infer(tensors: Tensors) -> Tensors:
        if (tensors["x"] < 0).any():
            raise FloatingPointError
        return {"twice": 2 * tensors["x"]}

    def check(outputs: Tensors) -> None:
        if (outputs["twice"] == 2 * 13).any():
            raise EngineError("thirteen")

    async def scenario() -> tuple[list[float | str], BatchingStatistics]:
        policy = BatchingPolicy(max_batch_size=4, max_queue_delay_s=0.001, queue_limit=100)
        batcher = Batcher(infer, policy, slots, check=check, max_on_loop_s=max_on_loop_s)

        async def client(number: int) -> list[float | str]:
            said: list[float | str] = []
            for turn in range(40):
                value = rng.choice([number * 100 + turn + 20, number * 100 + turn + 20, 13, -1])
                try:
                    async with asyncio.timeout(rng.choice([None, None, 0.0005])):
                        answer = await batcher.infer(
                            row(value, rng.choice([1, 1, 6]), rng.choice([1, 2])),
                            timeout_s=rng.choice([None, 0.001, 9]),
                        )
                    assert set(answer["twice"].ravel().tolist()) == {2.0 * value}
                    said.append("good")
                except (TimeoutError, DeadlineError, EngineError, FloatingPointError) as error:
                    said.append(type(error).__name__)
            return said

        said = await asyncio.wait_for(asyncio.gather(*map(client, range(16))), timeout=30)
        await asyncio.wait_for(batcher.close(), timeout=10)
        assert not batcher.waiting
        return [word for words in said for word in words], batcher.statistics

    said, counted = asyncio.run(scenario())
    assert counted.success.count + counted.fail.count == len(said) == 640
    assert counted.success.count >= said.count("good") > 100, "some were told when their client had just gone"
    assert counted.failures["engine"] >= said.count("EngineError") + said.count("FloatingPointError") > 100
