"""Joining requests into calls of the engine."""

from collections.abc import Iterator, Sequence

import numpy as np

from app.engines.base import Engine
from app.tensors import Tensors


def infer_together(engine: Engine, requests: Sequence[Tensors], most_rows: int) -> list[Tensors]:
    """Run requests in calls of ``most_rows`` at most, and give each its own rows back, in order.

    Requests share a call if their rows are of one shape; one with more rows takes several calls.
    """
    pieces = [(index, piece) for index, request in enumerate(requests) for piece in _cut(request, most_rows)]
    answers: list[list[Tensors]] = [[] for _ in requests]
    for members in _calls([piece for _, piece in pieces], most_rows):
        given = [pieces[member][1] for member in members]
        outputs = engine.infer(_joined(given))
        ends = np.cumsum([_rows(piece) for piece in given])[:-1]
        parts = {name: np.split(tensor, ends) for name, tensor in outputs.items()}
        for place, member in enumerate(members):
            answers[pieces[member][0]].append({name: parts[name][place] for name in parts})
    return [_joined(each) for each in answers]


def _calls(requests: Sequence[Tensors], most_rows: int) -> Iterator[list[int]]:
    """The indices of the requests of each call, each request's in order."""
    groups: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(tuple(request[name].shape[1:] for name in sorted(request)), []).append(index)
    for group in groups.values():
        call, rows = [group[0]], _rows(requests[group[0]])
        for index in group[1:]:
            more = _rows(requests[index])
            if rows + more > most_rows:
                yield call
                call, rows = [], 0
            call, rows = [*call, index], rows + more
        yield call


def _cut(request: Tensors, most_rows: int) -> Iterator[Tensors]:
    for start in range(0, _rows(request), most_rows):
        yield {name: tensor[start : start + most_rows] for name, tensor in request.items()}


def _joined(parts: Sequence[Tensors]) -> Tensors:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _rows(request: Tensors) -> int:
    return len(next(iter(request.values())))
