"""A version behind an endpoint: what is asked of it is joined, run and answered."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from app.data.examples import Input
from app.errors import DeadlineError, EngineError, OverloadError, RequestError
from app.serving.batching.batcher import Batcher
from app.serving.batching.policy import BatchingPolicy
from app.serving.batching.statistics import (
    BatchingStatistics,
    ComputeDurations,
    Durations,
    FailureReason,
    RecentLatencies,
)
from app.serving.model.health import EngineHealth
from app.serving.model.loaded import LoadedModel, ShapeGroup
from app.serving.protocol.infer import InferRequest, InferResponse, build_response, check_outputs
from app.serving.protocol.management import (
    BatchStatistics,
    Duration,
    InferenceStatistics,
    ModelMetadata,
    ModelStatistics,
    TensorMetadata,
)
from app.serving.protocol.natural import NaturalModel, PredictRequest, PredictResponse
from app.tensors import OUTPUT, Tensors, check_tensors, restore_order

MAX_ROWS = 1024
"""Of a request, which takes several calls of the engine if a call takes fewer."""
_REASONS: dict[type[BaseException], FailureReason] = {
    OverloadError: FailureReason.REJECTED,
    DeadlineError: FailureReason.DEADLINE,
    asyncio.CancelledError: FailureReason.CANCELLED,
}


class ServedModel:
    """A loaded model whose waiting requests share calls of its engine."""

    def __init__(self, model: LoadedModel, policy: BatchingPolicy) -> None:
        self.model = model
        self.version = model.version
        """The version, as the protocol writes it."""
        self.inputs = model.processor.inputs
        """What a request may hold. Kept: a processor makes them anew each time it is asked."""
        self.policy = policy
        self.batcher = Batcher(model.engine.run, policy, check=_check_finite)
        """For requests that ``check_request`` passes. Answers are for ``record_answer``, EngineErrors for ``blame``."""
        # Of its own: where health checks run, many texts that are being encoded would keep these waiting.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self._encoding = 0
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self._last_inference_ms = 0
        self.health = EngineHealth(model.check)
        """The health of its engine."""
        self.latencies = RecentLatencies()
        """Of requests that were answered, or would have been too late."""

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer a request of the protocol; the errors are those of ``run``."""
        check_outputs(request, self.model.engine.signature.outputs)
        outputs = await self.run(
            request.inputs,
            priority=request.parameters.priority,
            timeout_s=request.parameters.timeout_s,
        )
        return build_response(request, self.version, outputs, {OUTPUT: self.model.labels})

    async def predict(self, request: PredictRequest) -> PredictResponse:
        """Answer with labels; the errors are those of ``run``, and DataError of what cannot be read."""
        deadline_s = self.policy.deadline_s(time.monotonic(), request.timeout_s)
        outputs = await self.run_natural(request.listed, priority=request.priority, deadline_s=deadline_s)
        return PredictResponse(
            model_name=self.model.manifest.name,
            model_version=self.version,
            predictions=self.model.decode(outputs[OUTPUT]),
        )

    async def _encode(self, inputs: Sequence[Input], deadline_s: float) -> list[ShapeGroup]:
        """Tensors of natural inputs.

        Raises:
            OverloadError: as many requests are being read as may wait.
            DeadlineError: it was too late to read these when the others had been.
        """
        if self._encoding >= self.policy.queue_limit:
            raise OverloadError(f"{self._encoding} requests are being read already: try again later")
        self._encoding += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._encoder, self._read, inputs, deadline_s)
        finally:
            self._encoding -= 1

    def _read(self, inputs: Sequence[Input], deadline_s: float) -> list[ShapeGroup]:
        if time.monotonic() >= deadline_s:
            raise DeadlineError("the request's time was over before it could be read: try again, or allow more time")
        return self.model.encode(inputs)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Count a request that fails in here, which the batcher never sees."""
        began_s = time.monotonic()
        try:
            yield
        except BaseException as error:
            self.batching.failed(_REASONS.get(type(error), FailureReason.UNREAD), time.monotonic() - began_s)
            raise

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Close only afterwards, and after what has been asked by then."""
        self._users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def run_natural(self, inputs: Sequence[Input], *, priority: int, deadline_s: float) -> Tensors:
        """Read texts or images and run them, those of each length together; the errors are those of ``predict``.

        Args:
            inputs: a row each; an image as bytes or in base64.
            priority: as of ``run``.
            deadline_s: until the answer, of ``time.monotonic``.
        """
        with self.lease(), self.latencies.timed():
            with self._reading():
                _check_rows("inputs", len(inputs))
                parts = await self._encode(inputs, deadline_s)
            # One after the other: all of a list has one place in the queue.
            answers = [await self._run(part.tensors, priority, deadline_s - time.monotonic()) for part in parts]
        return restore_order([part.places for part in parts], answers)

    async def run(self, tensors: Tensors, *, priority: int = 0, timeout_s: float | None = None) -> Tensors:
        """Run one request among others.

        Args:
            priority: 1 is the most urgent; 0 means the default.
            timeout_s: until the answer, from now on.

        Raises:
            RequestError: a tensor is not what the model takes, or the model has no finite answer to it.
            OverloadError: as many requests wait as the queue holds.
            DeadlineError: the answer would be too late.
            EngineError: the engine failed, and does not answer a blank request either.
        """
        with self.latencies.timed():
            return await self._run(tensors, priority, timeout_s)

    async def _run(self, tensors: Tensors, priority: int, timeout_s: float | None) -> Tensors:
        """Raises as ``run``."""
        with self._reading():
            self._check_inputs(tensors)
        return await self._call(tensors, priority, timeout_s)

    def check_request(self, request: InferRequest) -> None:
        """Raise RequestError if the model does not take the inputs of a request, or does not give its outputs."""
        check_outputs(request, self.model.engine.signature.outputs)
        self._check_inputs(request.inputs)

    def record_answer(self) -> None:
        """Note that the engine has answered just now."""
        self._last_inference_ms = round(time.time() * 1e3)
        self.health.answered()

    async def blame(self, error: EngineError) -> RequestError:
        """Return the error of a request that the engine failed on: the request is to blame if a blank one is answered.

        Raises:
            EngineError: it does not.
        """
        await self.health.ask()
        refusal = RequestError(f"the model cannot run these inputs: {error}")
        refusal.__cause__ = error
        return refusal

    @property
    def batching(self) -> BatchingStatistics:
        """What has become of its requests, and why its calls were made; it goes on counting."""
        return self.batcher.statistics

    @property
    def waiting(self) -> int:
        """Requests that the engine has not begun with."""
        return self.batcher.waiting

    async def check(self, *, may_probe: bool = True) -> None:
        """See whether the engine answers. One that is at work is left to it, however long others wait behind that.

        Args:
            may_probe: whether the check may send it a blank request.

        Raises:
            EngineError: it fails, answers numbers that are not finite, or does not come back from a call.
        """
        await self.health.check(self.batcher.running_s, may_probe=may_probe)

    async def _call(self, tensors: Tensors, priority: int, timeout_s: float | None) -> Tensors:
        """Raises as ``run``, after the tensors were checked."""
        try:
            outputs = await self.batcher.infer(tensors, priority=priority, timeout_s=timeout_s)
        except EngineError as error:
            raise await self.blame(error) from error
        self.record_answer()
        return outputs

    def _check_inputs(self, tensors: Tensors) -> None:
        check_tensors(tensors, self.inputs)
        _check_rows(f"input {self.inputs[0].name!r}", len(tensors[self.inputs[0].name]))

    @property
    def natural(self) -> NaturalModel:
        """What a person can ask it."""
        return NaturalModel(
            name=self.model.manifest.name,
            version=self.version,
            input=self.model.processor.modality,
            labels=self.model.labels,
        )

    @property
    def metadata(self) -> ModelMetadata:
        """What the model takes and gives."""
        return ModelMetadata(
            name=self.model.manifest.name,
            versions=[self.version],
            platform=self.model.platform,
            inputs=[TensorMetadata.of(spec) for spec in self.inputs],
            outputs=[TensorMetadata.of(spec) for spec in self.model.engine.signature.outputs],
        )

    @property
    def statistics(self) -> ModelStatistics:
        """What it has done since it was loaded. Calls whose answer is not finite have succeeded, their requests not."""
        counted = self.batching
        return ModelStatistics(
            name=self.model.manifest.name,
            version=self.version,
            last_inference=self._last_inference_ms,
            inference_count=counted.inferences,
            execution_count=counted.executions,
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
        """Answer what was asked, then give the engine's memory back."""
        await self._unused.wait()  # who reads texts goes on to the batcher before this does
        await self.batcher.close()
        await self.health.close()
        await asyncio.to_thread(self._encoder.shutdown)  # it may still read for a client that has gone
        await asyncio.to_thread(self.model.engine.close)


def _check_rows(what: str, rows: int) -> None:
    if rows > MAX_ROWS:
        raise RequestError(f"{what} has {rows} rows: at most {MAX_ROWS} in one request")


def _check_finite(outputs: Tensors) -> None:
    for name, output in outputs.items():
        if not np.isfinite(output).all():
            raise RequestError(f"output {name!r} is not finite for these inputs: give finite numbers, and full rows")


def _duration(durations: Durations) -> Duration:
    return Duration(count=durations.count, ns=durations.ns)


def _compute(durations: ComputeDurations) -> dict[str, Duration]:
    return {
        "compute_input": _duration(durations.input),
        "compute_infer": _duration(durations.infer),
        "compute_output": _duration(durations.output),
    }
