"""Rows on their way through the stages of a cascade."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.serving.cascade.interface import Interface, require_alike
from app.serving.cascade.rule import CascadeRule
from app.tensors import OUTPUT, Tensors

Infer = Callable[[Tensors], Awaitable[Tensors]]


@dataclass(frozen=True)
class Stage:
    """A version of a model, and how it is asked: through its batcher."""

    interface: Interface
    infer: Infer


class Cascade:
    """Asks each stage in turn for the rows that none before it was sure of."""

    def __init__(self, stages: Sequence[Stage], rule: CascadeRule) -> None:
        """Prepare. Raises RecipeError if the stages are not alike, or ValueError if the rule is for more or fewer."""
        if len(stages) != rule.num_stages:
            raise ValueError(f"{len(stages)} stages, and a rule for {rule.num_stages}: expected as many")
        require_alike([stage.interface for stage in stages])
        self._stages = stages
        self._rule = rule

    async def infer(self, tensors: Tensors) -> tuple[Tensors, NDArray[np.int8]]:
        """The answer to each row, and the place of the stage that gave it, of shape (rows).

        Raises:
            RayloomError: what a stage raises; then there is no answer to any row.
        """
        outputs: dict[str, NDArray[Any]] = {}
        stages = np.empty(len(next(iter(tensors.values()))), np.int8)
        rows = np.arange(len(stages))
        for stage in self._rule.used:
            answers = await self._stages[stage].infer(_taken(tensors, rows))
            sure = self._rule.sure(stage, answers[OUTPUT])
            if not outputs and sure.all():
                return answers, np.full_like(stages, stage)
            for name, answer in answers.items():
                if name not in outputs:
                    outputs[name] = np.empty((len(stages), *answer.shape[1:]), answer.dtype)
                outputs[name][rows[sure]] = answer[sure]
            stages[rows[sure]] = stage
            rows = rows[~sure]
            if not len(rows):
                break
        return outputs, stages


def _taken(tensors: Tensors, rows: NDArray[np.intp]) -> Tensors:
    if len(rows) == len(next(iter(tensors.values()))):
        return tensors
    return {name: tensor[rows] for name, tensor in tensors.items()}
