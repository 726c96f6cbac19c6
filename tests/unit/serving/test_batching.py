"""Which requests share a call of the engine, in which order, and when it runs; in virtual time."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest

from app.errors import RequestError
from app.serving.batching.scheduler import BatchingPolicy, RowsByLength
from app.tensors import Tensors
from tests.virtual_engine import Answered, VirtualEngine, ask, row, run

Sent = tuple[float, int, int, int]
"""When a request is sent, its rows, its length and its priority."""


async def _all(engine: VirtualEngine, requests: list[tuple[float, Tensors, dict[str, Any]]], **knobs: Any) -> Any:
    """Send requests at their times; the answers, in order, and what was counted."""
    batcher = engine.batcher(**knobs)
    answers = await asyncio.gather(*(ask(batcher, at_s, tensors, **options) for at_s, tensors, options in requests))
    await batcher.close()
    return answers, batcher.statistics


def test_a_batch_is_what_waits_when_the_engine_is_free() -> None:
    engine = VirtualEngine(call_s=0.3)
    requests = [(0.02 * number, row(number), {}) for number in range(24)]
    answers, statistics = run(_all(engine, requests, max_batch_size=8))
    assert engine.sizes == [1, 8, 8, 7]
    assert engine.started_s == [0.0, 0.3, 0.6, 0.9]
    assert engine.calls == [[0], [*range(1, 9)], [*range(9, 17)], [*range(17, 24)]]
    assert [answer.values for answer in answers] == [[2 * number] for number in range(24)]
    assert statistics.releases == {"idle": 2, "full": 2}


def test_requests_of_one_turn_of_the_loop_share_a_call() -> None:
    engine = VirtualEngine(call_s=0.1)
    answers, _ = run(_all(engine, [(0.0, row(number), {}) for number in range(5)], max_batch_size=8))
    assert engine.sizes == [5]
    assert {answer.at_s for answer in answers} == {0.1}


def test_rows_fill_calls_and_come_back_together() -> None:
    engine = VirtualEngine(call_s=0.1)
    answers, statistics = run(_all(engine, [(0.0, row(n, rows=n), {}) for n in (5, 9, 1, 4)], max_batch_size=8))
    assert engine.calls == [[5] * 5 + [9] * 3, [9] * 6 + [1] + [4], [4] * 3]
    assert answers == [Answered(at_s, [2 * n] * n) for n, at_s in ((5, 0.1), (9, 0.2), (1, 0.2), (4, 0.3))]
    assert statistics.inferences == 19


def test_two_slots_run_at_once() -> None:
    engine = VirtualEngine(call_s=0.1)
    run(_all(engine, [(0.0, row(0, rows=6), {}), (0.05, row(1), {})], max_batch_size=4, slots=2))
    assert engine.started_s == [0.0, 0.0, 0.1]
    assert engine.sizes == [4, 2, 1]


def test_rows_of_different_shapes_and_types_go_in_different_calls_the_oldest_first() -> None:
    engine = VirtualEngine(call_s=0.1)
    whole = {"x": np.ones((1, 1), np.int64)}
    lengths = [(0.0, 7), (0.01, 1), (0.02, 2), (0.03, 1), (0.04, 3), (0.05, 2)]
    requests = [(at_s, row(number, length=length), {}) for number, (at_s, length) in enumerate(lengths)]
    run(_all(engine, [*requests, (0.06, whole, {})], max_batch_size=8))
    assert engine.calls == [[0], [1, 3], [2, 5], [4], [1]]


def test_a_shape_that_is_always_there_does_not_starve_another() -> None:
    engine = VirtualEngine(call_s=0.1)
    common = [(0.01 * number, row(1), {}) for number in range(200)]
    answers, _ = run(_all(engine, [*common, (0.055, row(9, length=2), {})], max_batch_size=4, queue_limit=1000))
    assert answers[-1].at_s == 0.4, "after the five that came before it, in two calls"


def test_the_order_of_a_requests_tensors_does_not_matter() -> None:
    engine = VirtualEngine(call_s=0.1)
    other = {"x": np.zeros((1, 1)), "y": np.ones((1, 2))}
    run(_all(engine, [(0.0, other, {}), (0.0, dict(reversed(other.items())), {})], max_batch_size=4))
    assert engine.sizes == [2]


def test_a_call_ends_with_the_largest_preferred_size_that_is_reached() -> None:
    engine = VirtualEngine(call_s=0.1)
    requests = [(0.0, row(number), {}) for number in range(7)]
    _, statistics = run(_all(engine, requests, max_batch_size=8, preferred_batch_sizes=(2, 4)))
    assert engine.sizes == [4, 2, 1]
    assert statistics.releases == {"preferred": 2, "idle": 1}


def test_a_call_takes_as_many_rows_as_their_length_allows() -> None:
    engine = VirtualEngine(call_s=0.1)
    by_length = RowsByLength("x", 1, ((2, 4), (8, 1)))
    lengths = [1, 2, 2, 2, 2, 2, 5, 9, 9]
    requests = [(0.0, row(length, length=length), {}) for length in lengths]
    _, statistics = run(
        _all(engine, [*requests, (0.0, row(8, rows=3, length=8), {})], max_batch_size=4, by_length=by_length)
    )
    assert engine.calls == [[1], [2] * 4, [2], [5], [9], [9], [8], [8], [8]]
    assert statistics.releases == {"full": 7, "idle": 2}


@pytest.mark.parametrize(("length", "rows"), [(1, 8), (32, 8), (33, 4), (64, 4), (65, 2), (128, 2), (1000, 2)])
def test_a_length_that_was_not_measured_has_the_rows_of_the_next_longer(length: int, rows: int) -> None:
    policy = BatchingPolicy(8, by_length=RowsByLength("ids", 1, ((32, 8), (64, 4), (128, 2))))
    assert policy.max_rows({"mask": np.ones((1, 1)), "ids": np.ones((3, length))}) == rows


def test_a_request_is_not_cut_for_a_preferred_size() -> None:
    engine = VirtualEngine(call_s=0.1)
    run(_all(engine, [(0.0, row(0, rows=3), {})] * 2, max_batch_size=8, preferred_batch_sizes=(4,)))
    assert engine.sizes == [6]


def test_urgent_requests_go_first_and_others_fill_their_call() -> None:
    engine = VirtualEngine(call_s=0.1)
    levels = [0, 3, 2, 1, 3, 1, 99]
    requests = [(0.01 * number, row(number), {"priority": level}) for number, level in enumerate(levels)]
    run(_all(engine, requests, max_batch_size=3, priority_levels=3, default_priority=2))
    assert engine.calls == [[0], [3, 5, 2], [6, 1, 4]]


@pytest.mark.parametrize("call_s", [0.1, 0.001])
def test_an_urgent_request_that_comes_while_the_engine_runs_goes_before_a_full_call(call_s: float) -> None:
    engine = VirtualEngine(call_s)
    meanwhile = [(0.1 * number * call_s, row(number), {}) for number in range(1, 5)]
    urgent = (1.5 * call_s, row(9), {"priority": 1})
    levels = {"priority_levels": 2, "default_priority": 2}
    run(_all(engine, [(0.0, row(0), {}), *meanwhile, urgent], max_batch_size=2, **levels))
    assert engine.calls == [[0], [1, 2], [9, 3], [4]]


def test_an_urgent_request_brings_its_shape_forward() -> None:
    engine = VirtualEngine(call_s=0.1)
    requests = [(0.0, row(0), {}), (0.01, row(1), {}), (0.02, row(2, length=2), {"priority": 1})]
    run(_all(engine, requests, max_batch_size=3, priority_levels=2, default_priority=2))
    assert engine.calls == [[0], [2], [1]]


@pytest.mark.parametrize("tensors", [{}, {"x": np.zeros((0, 2))}, {"x": np.zeros((2, 2)), "y": np.zeros((3, 2))}])
def test_a_request_without_rows_of_its_own_is_refused(tensors: Tensors) -> None:
    (answer,), _ = run(_all(VirtualEngine(call_s=0.1), [(0.0, tensors, {})], max_batch_size=3))
    assert isinstance(answer.error, RequestError)
    assert "the same rows" in str(answer.error)


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"max_batch_size": 4, "preferred_batch_sizes": (8,)}, r"preferred_batch_sizes are \[8\]"),
        ({"max_batch_size": 4, "by_length": RowsByLength("x", 1, ((2, 4), (8, 5)))}, r"by_length are .* 8: 5"),
        ({"max_batch_size": 4, "default_priority": 2}, "default_priority is 2"),
        ({"max_batch_size": 4, "max_queue_delay_s": -1.0}, "max_queue_delay_s is -1.0"),
        ({"max_batch_size": 4, "default_timeout_s": 0.0}, "default_timeout_s is 0.0"),
    ],
)
def test_a_knob_out_of_its_range_is_named(knobs: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        BatchingPolicy(**knobs)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_each_request_gets_its_own_rows_once_and_in_order(seed: int) -> None:
    """Random rows, shapes, levels, bad requests and clients that go away, over every knob."""
    rng = random.Random(seed)
    engine = VirtualEngine(call_s=0.01, row_s=0.002)
    knobs = {
        "slots": rng.choice((1, 2, 3)),
        "max_batch_size": rng.choice((1, 4, 8)),
        "max_queue_delay_s": rng.choice((0.0, 0.01)),
        "preferred_batch_sizes": rng.choice(((), (1,))),
        "priority_levels": 3,
        "queue_limit": 1000,
    }
    sent = [
        (rng.uniform(0, 1), rng.choice((1, 1, 2, 11)), rng.choice((1, 2)), rng.choice((1, 2, 3))) for _ in range(150)
    ]
    bad, gone = set(rng.sample(range(1, 150), 5)), set(rng.sample(range(150), 10))

    async def scenario() -> tuple[list[Answered | None], Any]:
        batcher = engine.batcher(**knobs)

        async def client(number: int, at_s: float, rows: int, length: int, level: int) -> Answered | None:
            request = ask(batcher, at_s, row(-number if number in bad else number, rows, length), priority=level)
            try:
                async with asyncio.timeout_at(at_s + 0.005 if number in gone else None):
                    return await request
            except TimeoutError:
                return None

        answers = await asyncio.gather(*(client(number, *request) for number, request in enumerate(sent)))
        await batcher.close()
        return answers, batcher.statistics

    answers, statistics = run(scenario())
    _require_own_answers(answers, sent, bad, gone)
    good = [values for values in engine.calls if min(values) >= 0]
    answered = [number for number, answer in enumerate(answers) if answer and not answer.error]
    assert statistics.success.count == len(answered)
    assert statistics.executions == len(good)
    ran = {number: sum(values.count(number) for values in good) for number in answered}
    assert ran == {number: sent[number][1] for number in answered}, "each row once"

    arrivals = defaultdict(list)
    for number in _by_first_call(engine):
        arrivals[sent[number][2:]].append(sent[number][0])
    assert all(times == sorted(times) for times in arrivals.values()), "in order within a shape and level"


def _require_own_answers(
    answers: Sequence[Answered | None], sent: Sequence[Sent], bad: Collection[int], gone: Collection[int]
) -> None:
    """Require of each request its own rows, its error if it is bad, or nothing if its client has gone."""
    for number, (answer, (_, rows, _, _)) in enumerate(zip(answers, sent, strict=True)):
        if answer is None:
            assert number in gone
        elif answer.error:
            assert number in bad
            assert isinstance(answer.error, FloatingPointError)
        else:
            assert answer.values == [2 * number] * rows


def _by_first_call(engine: VirtualEngine) -> list[int]:
    """Return the numbers of the requests in the order in which their first rows ran."""
    return [int(value) for value in dict.fromkeys(abs(value) for values in engine.calls for value in values)]
