"""Running many requests that are all there, in as few calls of an engine as their shapes allow."""

from collections.abc import Callable, Iterator, Sequence

from app.engines.base import Engine
from app.serving.batching.rows import by_shape, cut, join, rows_of
from app.tensors import Tensors


def infer_together(engine: Engine, requests: Sequence[Tensors], max_rows: Callable[[Tensors], int]) -> list[Tensors]:
    """Run requests together, and give each its own rows back, in order.

    Requests share a call if their rows are of one shape; one with more rows than a call takes several calls.

    Args:
        max_rows: returns the rows of a call for requests that have the shape of its argument, at most.
    """
    answers: list[list[Tensors]] = [[] for _ in requests]
    for group in by_shape(requests):
        for members in _calls(requests, group, max_rows(requests[group[0]])):
            outputs = engine.infer(join([piece for _, piece in members]))
            start = 0
            for index, piece in members:
                stop = start + rows_of(piece)
                answers[index].append(cut(outputs, start, stop))
                start = stop
    return [join(each) for each in answers]


def _calls(requests: Sequence[Tensors], group: Sequence[int], max_rows: int) -> Iterator[list[tuple[int, Tensors]]]:
    """The pieces of each call for requests of one shape, each request's in order."""
    call: list[tuple[int, Tensors]] = []
    rows = 0
    for index in group:
        for start in range(0, rows_of(requests[index]), max_rows):
            piece = cut(requests[index], start, start + max_rows)
            more = rows_of(piece)
            if rows + more > max_rows:
                yield call
                call, rows = [], 0
            call.append((index, piece))
            rows += more
    yield call
