"""Running many requests that are all there, in as few calls of an engine as their shapes allow."""

from collections.abc import Iterator, Sequence

from app.engines.base import Engine
from app.serving.batching.rows import by_shape, cut, join, rows_of
from app.tensors import Tensors


def infer_together(engine: Engine, requests: Sequence[Tensors], most_rows: int) -> list[Tensors]:
    """Run requests in calls of ``most_rows`` at most, and give each its own rows back, in order.

    Requests share a call if their rows are of one shape; one with more rows takes several calls.
    """
    pieces = [
        (index, cut(request, start, start + most_rows))
        for index, request in enumerate(requests)
        for start in range(0, rows_of(request), most_rows)
    ]
    answers: list[list[Tensors]] = [[] for _ in requests]
    for members in _calls(pieces, most_rows):
        outputs = engine.infer(join([piece for _, piece in members]))
        start = 0
        for index, piece in members:
            stop = start + rows_of(piece)
            answers[index].append(cut(outputs, start, stop))
            start = stop
    return [join(each) for each in answers]


def _calls(pieces: Sequence[tuple[int, Tensors]], most_rows: int) -> Iterator[list[tuple[int, Tensors]]]:
    """The pieces of each call, each request's in order."""
    for group in by_shape(piece for _, piece in pieces):
        call: list[tuple[int, Tensors]] = []
        rows = 0
        for index, piece in (pieces[place] for place in group):
            more = rows_of(piece)
            if rows + more > most_rows:
                yield call
                call, rows = [], 0
            call.append((index, piece))
            rows += more
        yield call
