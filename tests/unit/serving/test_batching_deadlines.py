"""What a batcher does with its model of the engine: deadlines, and whether waiting for more requests pays."""

import asyncio
import random
from typing import Any

import pytest

from app.errors import DeadlineError
from app.serving.batching.batcher import Batcher
from app.serving.batching.scheduler import LatencyModel, RowsByLength
from app.serving.batching.statistics import BatchingStatistics
from tests.virtual_engine import Answered, VirtualEngine, ask, row, run


def test_the_latency_model_finds_what_a_row_and_a_call_cost() -> None:
    model = LatencyModel()
    for rows in (1, 8, 3, 32, 5, 17):
        model.observe(rows, 0.002 * rows + 0.01)
    assert model.row_s == pytest.approx(0.002)
    assert model.call_s == pytest.approx(0.01)
    assert model.seconds(64) == pytest.approx(0.138)


def test_the_latency_model_forgets() -> None:
    model = LatencyModel()
    for row_s in (0.002, 0.001):
        for number in range(100):
            model.observe(1 + number % 8, row_s * (1 + number % 8) + 0.01)
    assert model.row_s == pytest.approx(0.001, rel=0.01)


def test_an_outlier_hardly_moves_the_latency_model() -> None:
    model = LatencyModel()
    for number in range(20):
        model.observe(1 + number % 8, 0.001 * (1 + number % 8) + 0.01)
    model.observe(1, 10.0)
    assert model.seconds(1) < 0.02


def test_calls_of_one_size_say_what_that_size_takes() -> None:
    model = LatencyModel()
    for _ in range(50):
        model.observe(4, 0.02)
    assert model.seconds(4) == pytest.approx(0.02)
    assert model.seconds(8) <= 0.04


async def _learnt(engine: VirtualEngine, **knobs: Any) -> Batcher:
    """A batcher that has learnt how long calls of 1 and 8 rows take, before 1 s."""
    batcher = engine.batcher(**knobs)
    for at_s, rows in ((0.0, 1), (0.4, 8)):
        await ask(batcher, at_s, row(0, rows=rows))
    return batcher


async def _asked(
    engine: VirtualEngine, requests: list[tuple[float, float, dict[str, Any]]], **knobs: Any
) -> tuple[list[Answered], BatchingStatistics]:
    """Requests of one row from 1 s on, to a batcher that knows its engine."""
    batcher = await _learnt(engine, **knobs)
    answers = await asyncio.gather(
        *(ask(batcher, 1.0 + at_s, row(value), **options) for at_s, value, options in requests)
    )
    await batcher.close()
    return answers, batcher.statistics


def test_a_deadline_that_passes_in_the_queue_fails_the_request_then() -> None:
    async def scenario() -> Answered:
        batcher = engine.batcher(max_batch_size=8)
        _, late = await asyncio.gather(ask(batcher, 0.0, row(1)), ask(batcher, 0.01, row(2), timeout_s=0.1))
        assert batcher.waiting == 0
        await batcher.close()
        return late

    engine = VirtualEngine(call_s=0.3)
    late = run(scenario())
    assert late.at_s == 0.11, "nothing is known of the engine yet"
    assert isinstance(late.error, DeadlineError)
    assert "waited for 0.1 s" in str(late.error)
    assert engine.calls == [[1]]


def test_a_request_fails_as_soon_as_the_engine_cannot_answer_it_in_time() -> None:
    engine = VirtualEngine(call_s=0.1)
    answers, statistics = run(_asked(engine, [(0.0, 1, {}), (0.01, 2, {"timeout_s": 0.15})], max_batch_size=8))
    assert answers[1].at_s == 1.06, "0.1 s before its deadline at 1.16 s"
    assert isinstance(answers[1].error, DeadlineError)
    assert statistics.failures == {"deadline": 1}
    assert engine.calls[2:] == [[1]]


async def _behind_one_row(engine: VirtualEngine, rows: int, timeout_s: float) -> tuple[Answered, BatchingStatistics]:
    """Send a request whose rows run one at a time. It arrives while another row runs."""
    batcher = engine.batcher(max_batch_size=8, by_length=RowsByLength("x", 1, ((1, 1),)))
    await ask(batcher, 0.0, row(0))
    _, answer = await asyncio.gather(
        ask(batcher, 1.0, row(1)), ask(batcher, 1.01, row(2, rows=rows), timeout_s=timeout_s)
    )
    await batcher.close()
    return answer, batcher.statistics


def test_a_request_whose_calls_together_end_late_is_refused_before_the_first() -> None:
    engine = VirtualEngine(call_s=0.1)
    answer, statistics = run(_behind_one_row(engine, rows=8, timeout_s=0.85))
    assert isinstance(answer.error, DeadlineError)
    assert answer.at_s == 1.06, "8 calls before its deadline at 1.86 s"
    assert engine.calls == [[0], [1]]
    assert statistics.failures == {"deadline": 1}


def test_a_request_that_has_begun_is_answered_even_if_the_engine_gets_slower() -> None:
    engine = VirtualEngine(call_s=0.1)

    async def scenario() -> Answered:
        asyncio.get_running_loop().call_at(1.15, setattr, engine, "call_s", 0.4)
        return (await _behind_one_row(engine, rows=4, timeout_s=0.6))[0]

    assert run(scenario()) == Answered(2.4, [4.0] * 4)


def test_an_idle_engine_tries_what_it_has_not_been_fast_enough_for() -> None:
    engine = VirtualEngine(call_s=0.1)
    answers, _ = run(_asked(engine, [(0.0, 1, {"timeout_s": 0.05})], max_batch_size=8))
    assert answers == [Answered(1.1, [2.0])], "late, but the engine might have become faster"


@pytest.mark.parametrize(("own_s", "server_s"), [(0.2, 9.0), (9.0, 0.2), (None, 0.2)])
def test_the_earlier_of_the_clients_and_the_servers_bound_counts(own_s: float | None, server_s: float) -> None:
    engine = VirtualEngine(call_s=0.3)
    requests = [(0.0, 1, {}), (0.01, 2, {"timeout_s": own_s})]
    (_, late), _ = run(_asked(engine, requests, max_batch_size=8, default_timeout_s=server_s))
    assert isinstance(late.error, DeadlineError)
    assert late.at_s < 1.2


def test_no_time_at_all_is_a_deadline_that_has_passed() -> None:
    engine = VirtualEngine(call_s=0.1)
    answers, _ = run(_asked(engine, [(0.0, 1, {"timeout_s": 0.0})], max_batch_size=8))
    assert answers[0].at_s == 1.0
    assert isinstance(answers[0].error, DeadlineError)


def test_a_call_stays_small_for_a_request_that_a_larger_one_would_make_late() -> None:
    engine = VirtualEngine(call_s=0.1, row_s=0.01)
    urgent = (0.02, 2, {"timeout_s": 0.22})  # 0.11 s of it until the engine is free
    answers, statistics = run(_asked(engine, [(0.0, 1, {}), urgent, (0.03, 3, {}), (0.04, 4, {})], max_batch_size=8))
    assert engine.calls[2:] == [[1], [2, 3], [4]]
    assert [answer.error for answer in answers] == [None] * 4
    assert statistics.releases["deadline"] == 1


def test_when_not_all_can_be_in_time_those_with_the_least_time_are_given_up() -> None:
    engine = VirtualEngine(call_s=0.1, row_s=0.01)
    late = [(0.001 * number, number, {"timeout_s": 0.27}) for number in range(1, 4)]
    others = [(0.001 * number, number, {"timeout_s": 0.31}) for number in range(4, 9)]
    answers, statistics = run(_asked(engine, [(0.0, 0, {}), *late, *others], max_batch_size=8))
    assert engine.calls[2:] == [[0], [3, 4, 5, 6, 7, 8]], "at 1.11 s; 6 rows take 0.16 s, 7 take 0.17 s"
    assert [type(answer.error) for answer in answers[1:3]] == [DeadlineError] * 2
    assert statistics.failures == {"deadline": 2}


def test_who_goes_away_in_the_turn_in_which_they_would_be_given_up_holds_nobody_up() -> None:
    async def scenario() -> BatchingStatistics:
        batcher, loop = await _learnt(engine, max_batch_size=8), asyncio.get_running_loop()
        tasks = [
            asyncio.create_task(ask(batcher, 1.0 + 0.001 * number, row(number), timeout_s=timeout_s))
            for number, timeout_s in enumerate([None] + 3 * [0.27] + 5 * [0.31])
        ]
        for task in tasks[1:3]:
            loop.call_at(1.11 - 5e-10, task.cancel)  # the turn in which the first call ends, but before it does
        await asyncio.gather(*tasks, return_exceptions=True)
        await batcher.close()
        return batcher.statistics

    engine = VirtualEngine(call_s=0.1, row_s=0.01)
    assert run(scenario()).failures == {"cancelled": 2}
    assert engine.calls[2:] == [[0], [3, 4, 5, 6, 7, 8]]


def test_an_urgent_request_is_not_given_up_for_less_urgent_ones() -> None:
    engine = VirtualEngine(call_s=0.1, row_s=0.01)
    urgent = (0.001, 1, {"timeout_s": 0.23, "priority": 1})
    others = [(0.002, number, {"timeout_s": 0.3}) for number in range(2, 9)]
    answers, _ = run(
        _asked(engine, [(0.0, 0, {}), urgent, *others], max_batch_size=8, priority_levels=2, default_priority=2)
    )
    assert answers[1].values == [2]


async def _goodput(rate: float, timeout_s: float) -> float:
    """Answers in time, as a share of what full calls could give; over 3 s of requests at random times."""
    engine = VirtualEngine(call_s=0.01, row_s=0.001)
    batcher = engine.batcher(max_batch_size=32, queue_limit=1000)
    rng = random.Random(0)
    times = [rng.uniform(0, 3) for _ in range(int(3 * rate))]
    answers = await asyncio.gather(*(ask(batcher, at_s, row(1), timeout_s=timeout_s) for at_s in times))
    in_time = [answer for answer, at_s in zip(answers, times, strict=True) if not answer.error]
    return len(in_time) / (3 * 32 / 0.042)


def test_an_engine_with_too_much_to_do_still_answers_as_many_as_it_can() -> None:
    assert run(_goodput(rate=1500, timeout_s=0.1)) > 0.95


async def _closed_loop(clients: int, think_s: float, delay_s: float) -> tuple[VirtualEngine, BatchingStatistics, float]:
    """Clients that ask again some time after each answer; the engine, what was counted, and answers a second."""
    engine = VirtualEngine(call_s=0.01, row_s=0.001)
    batcher = engine.batcher(max_batch_size=8, max_queue_delay_s=delay_s)

    async def client(number: int) -> None:
        for turn in range(100):
            await asyncio.sleep(think_s * (1 + number / 10) if turn else 0.005 * number)
            await batcher.infer(row(number))

    await asyncio.gather(*map(client, range(clients)))
    await batcher.close()
    return engine, batcher.statistics, 100 * clients / asyncio.get_running_loop().time()


def test_a_lone_client_never_waits_for_others() -> None:
    _, statistics, rate = run(_closed_loop(1, think_s=0.001, delay_s=0.005))
    assert rate == pytest.approx(1 / 0.012, rel=0.01)
    assert statistics.queue.ns == 0


def test_the_engine_waits_for_clients_that_come_back_soon() -> None:
    """Without that two clients would take turns, each in a call of its own."""
    _, _, at_once = run(_closed_loop(2, think_s=0.001, delay_s=0.0))
    engine, _, waiting = run(_closed_loop(2, think_s=0.001, delay_s=0.005))
    assert at_once == pytest.approx(1 / 0.011, rel=0.02)
    assert waiting > 1.5 * at_once
    assert set(engine.sizes[-20:-2]) == {2}


def test_the_engine_does_not_wait_for_clients_that_come_back_late() -> None:
    _, _, at_once = run(_closed_loop(2, think_s=0.009, delay_s=0.0))
    _, statistics, waiting = run(_closed_loop(2, think_s=0.009, delay_s=0.005))
    assert waiting == pytest.approx(at_once, rel=0.02)
    assert statistics.releases["delay"] < 5


async def _shared(clients: int, delay_s: float) -> Batcher:
    """One whose clients have shared calls for long, so that the others are expected if one asks now."""
    engine, loop = VirtualEngine(call_s=0.1), asyncio.get_running_loop()
    batcher = engine.batcher(max_batch_size=8, max_queue_delay_s=delay_s)

    async def client(number: int) -> None:
        await asyncio.sleep(0.03 * number)
        while loop.time() < 6:
            await batcher.infer(row(number))
            await asyncio.sleep(0.001)

    await asyncio.gather(*map(client, range(clients)))
    assert engine.sizes[-1] == clients
    return batcher


async def _held(delay_s: float, **options: Any) -> tuple[float, BatchingStatistics]:
    """Of two clients that have shared calls for long one does not come back: how long the other takes then."""
    batcher = await _shared(2, delay_s)
    asked_s = asyncio.get_running_loop().time() + 0.001
    answer = await ask(batcher, asked_s, row(3), **options)
    await batcher.close()
    return answer.at_s - asked_s, batcher.statistics


def test_nobody_is_held_longer_than_the_delay() -> None:
    seconds, statistics = run(_held(delay_s=0.02))
    assert seconds == pytest.approx(0.12, abs=1e-5)
    assert statistics.releases["delay"] == 1


def test_who_comes_after_one_that_was_held_and_left_is_held_as_long() -> None:
    async def scenario() -> float:
        batcher, loop = await _shared(3, delay_s=0.02), asyncio.get_running_loop()
        leaves = asyncio.create_task(batcher.infer(row(1)))
        await asyncio.sleep(0.01)
        leaves.cancel()
        asked_s = loop.time() + 0.015  # 0.025 s after the one that was held
        answer = await ask(batcher, asked_s, row(2))
        await batcher.close()
        return answer.at_s - asked_s

    assert run(scenario()) == pytest.approx(0.12, abs=1e-5)


def test_nobody_is_held_longer_than_can_pay() -> None:
    seconds, statistics = run(_held(delay_s=0.2))
    assert seconds == pytest.approx(0.15, abs=1e-5), "half of what a call costs"
    assert statistics.releases["delay"] == 0


def test_nobody_is_held_whose_deadline_is_near() -> None:
    seconds, statistics = run(_held(delay_s=0.02, timeout_s=0.11))
    assert seconds == pytest.approx(0.1, abs=1e-5)
    assert statistics.releases["deadline"] == 1
