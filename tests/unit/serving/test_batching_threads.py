"""The threads in which an engine runs, and the event loop beside them."""

import asyncio
import math
import random
import threading
import time

import pytest

from app.errors import DeadlineError, EngineError
from app.serving.batching.batcher import Batcher, CallResult, EngineThreads
from app.serving.batching.scheduler import BatchingPolicy, Hold, RequestBatch
from app.serving.batching.statistics import BatchingStatistics
from app.tensors import Tensors
from tests.virtual_engine import row


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

        batcher = Batcher(infer, BatchingPolicy(max_batch_size=1), max_on_loop_s=5e-4 if expected_s else 60.0)
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
