"""A cascade behind an endpoint: models with their own queues, under the name of the last one."""

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from app.errors import RequestError
from app.published.loaded import LoadedModel
from app.serving.batching.statistics import RecentLatencies
from app.serving.cascade.rule import CascadeRule
from app.serving.cascade.stages import read_alike
from app.serving.model.served import ServedModel
from app.serving.protocol.infer import InferRequest, InferResponse, build_response, check_outputs
from app.serving.protocol.predict import PredictRequest, PredictResponse
from app.tensors import OUTPUT, Tensors, TensorSpec, count_rows, restore_order, select_rows

STAGE = "stage"
"""The response parameter with the stage that answered each row, for example ``"0,0,1"`` for three rows."""

Ask = Callable[[int, NDArray[np.intp]], Awaitable[Tensors]]
"""Runs a stage, given by its index, on the rows with the given indices in the request. Keeps their order."""


async def route(rule: CascadeRule, num_rows: int, ask: Ask) -> tuple[Tensors, NDArray[np.intp]]:
    """Run each stage on the rows that no earlier stage was sure of, as one request.

    Args:
        num_rows: number of rows of the request, 1 or more.

    Returns:
        The answers in the order of the rows, and the stage of each, shape (rows).

    Raises:
        Exception: the error of a stage. Then no row gets an answer.
    """
    rows = np.arange(num_rows)
    indices: list[NDArray[np.intp]] = []
    answered: list[Tensors] = []
    stages = np.empty(num_rows, np.intp)
    # The last stage is sure of every row, so afterwards each row has an answer.
    for stage in rule.asked:
        answers = await ask(stage, rows)
        sure = rule.is_sure(stage, answers[OUTPUT])
        stages[rows[sure]] = stage
        indices.append(rows[sure])
        answered.append(select_rows(answers, sure))
        rows = rows[~sure]
        if not len(rows):
            break
    return restore_order(indices, answered), stages


class ServedCascade:
    """Stages that answer in place of the last one, the large model, under its name and version."""

    def __init__(self, stages: Sequence[ServedModel], rule: CascadeRule) -> None:
        """Run these stages. Their owner closes them."""
        *_, self._large = self._stages = list(stages)
        self._rule = rule
        self._read_alike = read_alike([stage.model for stage in stages])
        self.latencies = RecentLatencies()
        """The latencies of requests to the whole cascade."""
        self.rows = np.zeros(len(stages), np.int64)
        """Answered rows, by stage."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs that a request may have."""
        return self._large.inputs

    @property
    def version(self) -> str:
        """The version of the last stage."""
        return self._large.version

    @property
    def model(self) -> LoadedModel:
        """The last stage, whose labels all stages have."""
        return self._large.model

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer an inference request.

        Raises:
            RequestError: the stages encode the same input differently, so no tensors fit all of them.
            RayloomError: the error of a stage, as in ``ServedModel.infer``.
        """
        large = self._large.model
        if not self._read_alike:
            raise RequestError(
                f"model {large.manifest.name!r} is a cascade whose stages encode their input differently, "
                f"so no tensors fit all of them: ask /v1/models/{large.manifest.name}/predict, or name version "
                f"{large.version}, the last stage"
            ).of("stages.inputs_differ")
        check_outputs(request, large.engine.signature.outputs)
        deadline_s, priority = self._deadline_s(request.parameters.timeout_s), request.parameters.priority

        async def ask(stage: int, rows: NDArray[np.intp]) -> Tensors:
            inputs = request.inputs if len(rows) == num_rows else select_rows(request.inputs, rows)
            # All stages share the time of the request.
            left_s = deadline_s - time.monotonic()
            return await self._stages[stage].run(inputs, priority=priority, timeout_s=left_s)

        # Only the number of rows is needed here. The first stage checks the tensors themselves.
        num_rows = count_rows(request.inputs)
        outputs, stages = await self._route(num_rows, ask)
        return build_response(
            request, large.version, outputs, {OUTPUT: large.labels}, parameters={STAGE: ",".join(map(str, stages))}
        )

    async def predict(self, request: PredictRequest) -> PredictResponse:
        """Answer natural input with labels. Each stage encodes its rows itself. Raises as ``ServedModel.predict``."""
        inputs, large, deadline_s = request.listed, self._large.model, self._deadline_s(request.timeout_s)

        async def ask(stage: int, rows: NDArray[np.intp]) -> Tensors:
            given = [inputs[row] for row in rows]
            return await self._stages[stage].run_raw(given, priority=request.priority, deadline_s=deadline_s)

        outputs, stages = await self._route(len(inputs), ask)
        return PredictResponse(
            model_name=large.manifest.name,
            model_version=large.version,
            predictions=[
                prediction.model_copy(update={STAGE: stage})
                for prediction, stage in zip(large.decode(outputs), stages.tolist(), strict=True)
            ],
        )

    @property
    def earlier(self) -> list[ServedModel]:
        """All stages but the last."""
        return self._stages[:-1]

    def _deadline_s(self, timeout_s: float | None) -> float:
        return self._large.policy.deadline_s(time.monotonic(), timeout_s)

    async def _route(self, num_rows: int, ask: Ask) -> tuple[Tensors, NDArray[np.intp]]:
        """Route rows through the stages, and keep all of them open meanwhile."""
        # Hold all stages from the start: an update could close a later one while an earlier one runs.
        with ExitStack() as leases, self.latencies.timed():
            for stage in self._stages:
                leases.enter_context(stage.lease())
            outputs, stages = await route(self._rule, num_rows, ask)
        self.rows += np.bincount(stages, minlength=len(self.rows))
        return outputs, stages
