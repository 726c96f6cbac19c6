"""A version behind an endpoint: batches requests, runs and answers them."""

import asyncio
import math
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from app.data.examples import Natural
from app.errors import DeadlineError, EngineError, OverloadError, RequestError
from app.published.loaded import LoadedModel, ShapeGroup
from app.serving.batching.batcher import Batcher
from app.serving.batching.scheduler import BatchingPolicy
from app.serving.batching.statistics import (
    BatchingStatistics,
    ComputeDurations,
    Durations,
    FailureReason,
    RecentLatencies,
)
from app.serving.model.health import EngineHealth
from app.serving.protocol.infer import InferRequest, InferResponse, build_response, check_outputs
from app.serving.protocol.management import (
    BatchStatistics,
    InferenceStatistics,
    ModelMetadata,
    ModelStatistics,
    StatisticDuration,
    TensorMetadata,
)
from app.serving.protocol.predict import ModelDescription, PredictRequest, PredictResponse
from app.serving.traffic import Outcome, outcome_of
from app.tensors import Tensors, check_tensors, is_finite, restore_order

MAX_ROWS = 1024
"""The maximum rows of a request. It takes several calls of the engine if a call takes fewer."""
_REASONS: dict[Outcome, FailureReason] = {
    "overload": FailureReason.REJECTED,
    "deadline": FailureReason.DEADLINE,
    "cancelled": FailureReason.CANCELLED,
}


class ServedModel:
    """A loaded model whose waiting requests share calls of its engine."""

    def __init__(self, model: LoadedModel, policy: BatchingPolicy) -> None:
        self.model = model
        self.version = model.version
        """The version, as the protocol writes it."""
        self.inputs = model.inputs
        """The inputs that a request may have. Stored, because a processor builds them again at each access."""
        self.policy = policy
        named = {"model": model.manifest.name, "version": model.version}
        self.batcher = Batcher(model.engine.run, policy, check=_check_finite, span_attributes=named)
        """For requests that ``check_request`` accepts. Call ``record_answer`` or ``diagnose`` afterwards."""
        # A pool of its own: in the default one, health checks would wait behind many texts.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self._encoding = 0
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self.last_inference_ms = 0
        """The time of the last answer in milliseconds since the epoch; 0 if there was none."""
        self.health = EngineHealth(model.check)
        """The health of its engine."""
        self.latencies = RecentLatencies()
        """The latencies of requests that were answered or were late."""

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer an inference request. Raises as ``run``."""
        check_outputs(request, self.model.engine.signature.outputs)
        outputs = await self.run(
            request.inputs,
            priority=request.parameters.priority,
            timeout_s=request.parameters.timeout_s,
        )
        return build_response(request, self.version, outputs, self.model.labels_by_output)

    async def predict(self, request: PredictRequest) -> PredictResponse:
        """Answer natural input with labels. Raises as ``run``, and DataError if an input cannot be read."""
        deadline_s = self.policy.deadline_s(time.monotonic(), request.timeout_s)
        answered = await self._run_raw(request.listed, request.priority, deadline_s)
        predictions = {
            index: prediction
            for group, outputs in answered
            for index, prediction in zip(group.indices, self.model.decode(outputs, group), strict=True)
        }
        return PredictResponse(
            model_name=self.model.manifest.name,
            model_version=self.version,
            predictions=[predictions[index] for index in range(len(predictions))],
        )

    async def _encode(self, inputs: Sequence[Natural], deadline_s: float) -> list[ShapeGroup]:
        """Return the tensors of natural inputs.

        Raises:
            OverloadError: too many requests are being read.
            DeadlineError: the deadline passed before the inputs were read.
        """
        # Inputs that wait to be encoded are in no queue of the batcher yet.
        if self._encoding >= self.policy.queue_limit:
            raise OverloadError(f"{self._encoding} requests are being read already: try again later")
        self._encoding += 1
        is_over = threading.Event()
        left_s = None if deadline_s == math.inf else deadline_s - time.monotonic()
        try:
            # Checked here and not in the thread, so that a request that waits for the thread is refused in time.
            async with asyncio.timeout(left_s):
                return await asyncio.get_running_loop().run_in_executor(self._encoder, self._read, inputs, is_over)
        except TimeoutError:
            raise DeadlineError(
                "the request's time was over before it was read: try again, or allow more time"
            ) from None
        finally:
            self._encoding -= 1
            is_over.set()

    def _read(self, inputs: Sequence[Natural], is_over: threading.Event) -> list[ShapeGroup]:
        def go_on() -> None:
            # Nobody receives this error: the client has disconnected, or its request was refused.
            if is_over.is_set():
                raise DeadlineError("nobody waits for these inputs any more")

        return self.model.encode(inputs, go_on)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Count a request that is refused or fails within the block, because the batcher never sees it."""
        began_s = time.monotonic()
        try:
            yield
        except BaseException as error:
            if not self.count_invalid(error):
                reason = _REASONS.get(outcome_of(error), FailureReason.INTERNAL)
                self.batching.count_failure(reason, time.monotonic() - began_s)
            raise

    def count_invalid(self, error: BaseException) -> bool:
        """Count the request that ``error`` refuses, if the mistake is the client's. Return whether it is."""
        is_invalid = outcome_of(error) == "invalid"
        self.batching.invalid += is_invalid
        return is_invalid

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Keep the model open within the block, and until the requests made there are answered."""
        # Counted and not locked, because everything here runs on one event loop.
        self._users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def run_raw(self, inputs: Sequence[Natural], *, priority: int, deadline_s: float) -> Tensors:
        """Read texts, images or rows, and return their outputs, which all have one shape. Raises as ``predict``.

        Args:
            inputs: one item per row; an image as bytes or in base64.
            priority: as for ``run``.
            deadline_s: time by which the answer is due, on the clock ``time.monotonic``.
        """
        answered = await self._run_raw(inputs, priority, deadline_s)
        return restore_order([group.indices for group, _ in answered], [outputs for _, outputs in answered])

    async def _run_raw(
        self, inputs: Sequence[Natural], priority: int, deadline_s: float
    ) -> list[tuple[ShapeGroup, Tensors]]:
        """Read texts or images, and run those of each shape together. Raises as ``predict``."""
        with self.lease(), self.latencies.timed():
            with self._reading():
                _check_rows("inputs", len(inputs))
                groups = await self._encode(inputs, deadline_s)
            # One after the other, so that a list takes a single place in the queue.
            return [
                (group, await self._run(group.tensors, priority, deadline_s - time.monotonic())) for group in groups
            ]

    async def run(self, tensors: Tensors, *, priority: int = 0, timeout_s: float | None = None) -> Tensors:
        """Run one request, batched with others.

        Args:
            priority: 1 is the most urgent; 0 means the default.
            timeout_s: time until the answer, from now on.

        Raises:
            RequestError: a tensor does not fit the model, or the model's answer is not finite.
            OverloadError: the queue is full.
            DeadlineError: the answer would be too late.
            EngineError: the engine failed, and does not answer a probe either.
        """
        with self.latencies.timed():
            return await self._run(tensors, priority, timeout_s)

    async def _run(self, tensors: Tensors, priority: int, timeout_s: float | None) -> Tensors:
        """Check and run a request. Raises as ``run``."""
        with self._reading():
            self._check_inputs(tensors)
        return await self._call(tensors, priority, timeout_s)

    def check_request(self, request: InferRequest) -> None:
        """Raise RequestError if a request's inputs or requested outputs do not fit the model."""
        check_outputs(request, self.model.engine.signature.outputs)
        self._check_inputs(request.inputs)

    def record_answer(self) -> None:
        """Record that the engine has answered just now."""
        self.last_inference_ms = round(time.time() * 1e3)
        self.health.answered()

    async def diagnose(self, error: EngineError) -> RequestError:
        """Return the error of a request that made a healthy engine fail: the engine answers a probe afterwards.

        Raises:
            EngineError: the engine does not answer the probe.
        """
        # A probe tells inputs that this engine cannot run from a broken engine.
        await self.health.probe()
        refusal = RequestError(f"the model cannot run these inputs: {error}").of("model.cannot_run")
        # Set by hand, because an exchange sends the error without raising it.
        refusal.__cause__ = error
        return refusal

    @property
    def batching(self) -> BatchingStatistics:
        """The live counters of its requests and calls."""
        return self.batcher.statistics

    @property
    def in_flight(self) -> int:
        """Requests that the batcher has taken and not answered yet."""
        return self.batcher.in_flight

    @property
    def is_idle(self) -> bool:
        """Whether no request is read, waits or runs."""
        return not (self._users or self._encoding or self.batcher.in_flight)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for the engine."""
        return self.batcher.waiting

    async def check(self, *, may_probe: bool = True) -> None:
        """Check that the engine answers. A busy engine is not probed, however long its queue is.

        Args:
            may_probe: whether the check may start a probe.

        Raises:
            EngineError: the engine fails, answers numbers that are not finite, or is stuck in a call.
        """
        await self.health.check(self.batcher.running_s, may_probe=may_probe)

    async def _call(self, tensors: Tensors, priority: int, timeout_s: float | None) -> Tensors:
        """Run a request whose tensors were checked. Raises as ``run``."""
        try:
            outputs = await self.batcher.infer(tensors, priority=priority, timeout_s=timeout_s)
        except EngineError as error:
            raise await self.diagnose(error) from error
        self.record_answer()
        return outputs

    def _check_inputs(self, tensors: Tensors) -> None:
        check_tensors(tensors, self.inputs)
        _check_rows(f"input {self.inputs[0].name!r}", len(tensors[self.inputs[0].name]))

    @property
    def description(self) -> ModelDescription | None:
        """The description of its natural input; None if it takes tensors only."""
        if self.model.processor is None or self.model.manifest.scores is None:
            return None
        return ModelDescription(
            name=self.model.manifest.name,
            version=self.version,
            input=self.model.processor.modality,
            labels=self.model.labels,
            columns=getattr(self.model.processor, "columns", []),
        )

    @property
    def metadata(self) -> ModelMetadata:
        """The inputs and outputs of the model."""
        return ModelMetadata(
            name=self.model.manifest.name,
            versions=[self.version],
            platform=self.model.platform,
            inputs=[TensorMetadata.of(spec) for spec in self.inputs],
            outputs=[TensorMetadata.of(spec) for spec in self.model.engine.signature.outputs],
        )

    @property
    def statistics(self) -> ModelStatistics:
        """Statistics since the version was loaded. A call counts as a success even if its answer is not finite."""
        counted = self.batching
        return ModelStatistics(
            name=self.model.manifest.name,
            version=self.version,
            last_inference=self.last_inference_ms,
            inference_count=counted.inferences,
            execution_count=counted.executions,
            invalid_count=counted.invalid,
            inference_stats=InferenceStatistics(
                success=_duration(counted.success),
                fail=_duration(counted.fail),
                queue=_duration(counted.queue),
                **_compute(counted.compute),
            ),
            batch_stats=[
                BatchStatistics(batch_size=rows, **_compute(calls)) for rows, calls in sorted(counted.batches.items())
            ],
        )

    async def close(self) -> None:
        """Answer all admitted requests, then free the engine's memory."""
        # Texts that are being read still have to reach the batcher.
        await self._unused.wait()
        await self.batcher.close()
        await self.health.close()
        # The encoder may still read texts of a client that has gone.
        await asyncio.to_thread(self._encoder.shutdown)
        await asyncio.to_thread(self.model.engine.close)


def _check_rows(name: str, rows: int) -> None:
    if rows > MAX_ROWS:
        raise RequestError(f"{name} has {rows} rows: at most {MAX_ROWS} in one request").of("rows.too_many")


def _check_finite(outputs: Tensors) -> None:
    for name, output in outputs.items():
        if not is_finite(output):
            raise RequestError(
                f"output {name!r} is not finite for these inputs: give finite numbers, and full rows"
            ).of("output.not_finite")


def _duration(durations: Durations) -> StatisticDuration:
    return StatisticDuration(count=durations.count, ns=durations.ns)


def _compute(durations: ComputeDurations) -> dict[str, StatisticDuration]:
    return {
        "compute_input": _duration(durations.input),
        "compute_infer": _duration(durations.infer),
        "compute_output": _duration(durations.output),
    }
