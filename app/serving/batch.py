"""Joining requests into one call of the engine."""

from collections.abc import Sequence

import numpy as np

from app.engines.base import Engine
from app.tensors import Tensors


def infer_together(engine: Engine, requests: Sequence[Tensors]) -> list[Tensors]:
    """Run requests in as few calls as their shapes allow, and give each its own rows back, in order."""
    groups: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(tuple(request[name].shape[1:] for name in sorted(request)), []).append(index)
    answers: dict[int, Tensors] = {}
    for members in groups.values():
        joined = {name: np.concatenate([requests[index][name] for index in members]) for name in requests[members[0]]}
        outputs = engine.infer(joined)
        ends = np.cumsum([len(next(iter(requests[index].values()))) for index in members])[:-1]
        parts = {name: np.split(tensor, ends) for name, tensor in outputs.items()}
        answers |= {index: {name: parts[name][place] for name in parts} for place, index in enumerate(members)}
    return [answers[index] for index in range(len(requests))]
