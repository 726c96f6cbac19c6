"""Requests that share calls of the engine."""

import numpy as np
import pytest

from app.engines.base import PooledEngine, Signature, infer_many
from app.tensors import Tensors, TensorSpec
from tests.wording import refused


class Doubling(PooledEngine[list[tuple[int, ...]]]):
    """Answers twice what it is given, and notes the shape of each call."""

    name, version = "doubling", "1"

    def __init__(self) -> None:
        inputs = tuple(TensorSpec(name, np.dtype(np.int64), (-1, -1)) for name in ("ids", "mask"))
        self.calls: list[tuple[int, ...]] = []
        super().__init__(Signature(inputs, ()), [self.calls])

    def _run(self, member: list[tuple[int, ...]], inputs: Tensors) -> Tensors:
        member.append(inputs["ids"].shape)
        return {"twice": 2 * inputs["ids"], "masked": inputs["ids"] * inputs["mask"]}


def request(rows: int, length: int) -> Tensors:
    ids = np.random.default_rng(100 * rows + length).integers(1, 100, (rows, length))
    return {"ids": ids, "mask": np.zeros_like(ids)}


@pytest.mark.parametrize(
    ("shapes", "calls"),
    [
        ([(1, 4)], [(1, 4)]),
        ([(1, 4), (2, 4), (1, 4)], [(4, 4)]),
        ([(1, 4), (1, 8), (2, 4), (2, 8)], [(3, 4), (3, 8)]),
        ([(3, 4), (3, 4), (2, 4)], [(3, 4), (5, 4)]),
        ([(5, 4), (5, 4)], [(5, 4), (5, 4)]),
        ([(7, 4), (2, 4), (11, 8)], [(5, 4), (4, 4), (5, 8), (5, 8), (1, 8)]),
        ([], []),
    ],
)
def test_requests_of_one_shape_share_calls_that_are_not_too_large(
    shapes: list[tuple[int, int]], calls: list[tuple[int, int]]
) -> None:
    engine = Doubling()
    requests = [request(*shape) for shape in shapes]
    answers = infer_many(engine, requests, lambda _: 5)
    assert engine.calls == calls
    for asked, answer in zip(requests, answers, strict=True):
        assert np.array_equal(answer["twice"], 2 * asked["ids"])
        assert not answer["masked"].any()


def test_calls_have_the_maximum_rows_of_their_shape() -> None:
    engine = Doubling()
    requests = [request(3, 4), request(3, 8), request(1, 4)]
    answers = infer_many(engine, requests, lambda tensors: 8 // tensors["ids"].shape[1])
    assert engine.calls == [(2, 4), (2, 4), (1, 8), (1, 8), (1, 8)]
    for asked, answer in zip(requests, answers, strict=True):
        assert np.array_equal(answer["twice"], 2 * asked["ids"])


def test_the_order_of_a_requests_tensors_does_not_matter() -> None:
    engine = Doubling()
    requests = [request(1, 4), dict(reversed(request(2, 4).items()))]
    answers = infer_many(engine, requests, lambda _: 5)
    assert engine.calls == [(3, 4)]
    assert np.array_equal(answers[1]["twice"], 2 * requests[1]["ids"])


def test_an_engine_that_fails_fails_all() -> None:
    engine = Doubling()
    engine.close()
    with refused("engine.closed"):
        infer_many(engine, [request(1, 4), request(2, 4)], lambda _: 5)
