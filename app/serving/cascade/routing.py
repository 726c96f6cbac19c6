"""Rows on their way through the stages of a cascade."""

from collections.abc import Awaitable, Callable

import numpy as np
from numpy.typing import NDArray

from app.serving.batching.rows import in_order, taken
from app.serving.cascade.rule import CascadeRule
from app.tensors import OUTPUT, Tensors

Ask = Callable[[int, NDArray[np.intp]], Awaitable[Tensors]]
"""What a stage, by its place, answers to the rows with these places in the request, in this order."""


async def route(rule: CascadeRule, num_rows: int, ask: Ask) -> tuple[Tensors, NDArray[np.intp]]:
    """Ask each stage in turn for the rows that none before it was sure of, as one request.

    Args:
        num_rows: of the request, 1 or more.

    Returns:
        The answers in the order of the rows, and the stage that gave each, of shape (rows).

    Raises:
        Exception: what a stage raises; then there is no answer to any row.
    """
    rows = np.arange(num_rows)
    places: list[NDArray[np.intp]] = []
    answered: list[Tensors] = []
    stages = np.empty(num_rows, np.intp)
    for stage in rule.asked:
        answers = await ask(stage, rows)
        sure = rule.is_sure(stage, answers[OUTPUT])
        stages[rows[sure]] = stage
        places.append(rows[sure])
        answered.append(taken(answers, sure))
        rows = rows[~sure]
        if not len(rows):
            break
    return in_order(places, answered), stages
