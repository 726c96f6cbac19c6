"""Running many requests that are all there, in as few calls of an engine as their shapes allow."""

from collections.abc import Callable, Iterator, Sequence

from app.engines.base import Engine
from app.serving.batching.rows import by_shape, cut, join, rows_of
from app.tensors import Tensors


def infer_together(engine: Engine, requests: Sequence[Tensors], max_rows: Callable[[Tensors], int]) -> list[Tensors]:
    """Run requests together, and return the outputs of each, in order.

    Requests share calls if their rows have the same shape. A request with more rows than one call takes several calls.

    Args:
        max_rows: returns the maximum rows of a call for requests with the shape of its argument.
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
    """Yield the pieces of each call for requests of one shape; those of a request stay in order."""
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
