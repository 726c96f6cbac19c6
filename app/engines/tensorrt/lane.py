"""A lane runs one batch at a time on the GPU. It has a stream, scratch memory, and a context with buffers per size."""

from collections.abc import Callable, MutableSequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from app.engines.tensorrt.manifest import PlanManifest
from app.engines.tensorrt.profiles import Shape, index_of, resolved
from app.errors import EngineError, RequestError
from app.tensors import Tensor, Tensors


@dataclass(frozen=True)
class LoadedPlan:
    """A plan in memory, as a lane sees it."""

    manifest: PlanManifest
    new_context: Callable[[], Any]
    """Creates an execution context, or returns None. The caller provides its scratch memory."""
    scratch_bytes: int
    """The size of that scratch memory."""
    captures_graphs: bool
    """Whether contexts capture CUDA graphs by themselves; else the lane does."""
    messages: MutableSequence[str]
    """The library's error messages. A lane empties the list before each batch."""

    def check(self, done: bool, what: str) -> None:
        """Raise EngineError unless ``done``, the return value of a context's call."""
        if not done:
            raise EngineError(f"TensorRT refuses {what}: {'; '.join(self.messages) or 'it does not say why'}").of(
                "tensorrt.call_refused"
            )


class Lane:
    """Run one batch at a time. Lanes share only the plan, so each may run in its own thread."""

    def __init__(self, gpu: Any, plan: LoadedPlan) -> None:
        """Allocate memory, and capture a CUDA graph for each size that the plan is built for.

        Args:
            gpu: the module torch, which owns memory and streams.
        """
        self._gpu, self._plan = gpu, plan
        self._profile = plan.manifest.key.settings.profile
        self._stream = gpu.cuda.Stream()
        # One scratch memory for all contexts of the lane, because they never run at the same time.
        self._scratch = gpu.empty(plan.scratch_bytes, dtype=gpu.uint8, device="cuda")
        with gpu.cuda.stream(self._stream):
            self._captured = {
                (rows, length): self._bind(rows, length).capture()
                for rows in self._profile.batch_sizes
                for length in self._profile.lengths or (1,)
            }

    def infer(self, inputs: Tensors) -> Tensors:
        """Run a batch, padded to the next number of rows that the plan is built for.

        A length between those that it is built for runs without a graph, in a context created for the call.

        Raises:
            RequestError: the batch has more rows than the plan takes.
            EngineError: the library failed.
        """
        rows, length = self._rows_of(inputs), self._length_of(inputs)
        # All lanes share the messages. Another lane may lose its reason, but no lane reports an old one.
        self._plan.messages.clear()
        with self._gpu.cuda.stream(self._stream):
            bound = self._captured.get((rows, length)) or self._bind(rows, length)
            return bound.run(inputs)

    def _rows_of(self, inputs: Tensors) -> int:
        given = max(len(tensor) for tensor in inputs.values())
        for rows in self._profile.batch_sizes:
            if given <= rows:
                return rows
        raise RequestError(
            f"the batch has {given} rows: this engine was built for {self._profile.batch_sizes[-1]} at most"
        ).of("batch.too_large")

    def _length_of(self, inputs: Tensors) -> int:
        """Return the dynamic length, which all tensors that have one share; 1 if none has one."""
        given = [
            inputs[tensor.name].shape[axis]
            for tensor in self._plan.manifest.inputs
            for axis, size in enumerate(tensor.shape)
            if axis > 0 and size == -1
        ]
        return int(given[0]) if given else 1

    def _bind(self, rows: int, length: int) -> "_Bound":
        context = self._plan.new_context()
        self._plan.check(context is not None, "one more context")
        context.set_device_memory(self._scratch.data_ptr(), self._plan.scratch_bytes)
        index = index_of(self._profile, rows, length)
        chosen = context.set_optimization_profile_async(index, self._stream.cuda_stream)
        self._plan.check(chosen, f"profile {index}")
        return _Bound(self._gpu, self._plan, context, self._stream, rows, length)


@dataclass(frozen=True)
class _Buffer:
    """A tensor's memory: pinned on the host, so that copies are asynchronous, and on the device."""

    host: Any
    device: Any

    @classmethod
    def allocate(cls, gpu: Any, shape: Shape, dtype: str) -> Self:
        """Allocate zeros. What is there before the first batch must be valid, too, because it may be an index."""
        kind = getattr(gpu, dtype)
        return cls(gpu.zeros(shape, dtype=kind, pin_memory=True), gpu.zeros(shape, dtype=kind, device="cuda"))


class _Bound:
    """A context bound to fixed shapes and addresses, as a CUDA graph requires. It runs on the current stream."""

    def __init__(self, gpu: Any, plan: LoadedPlan, context: Any, stream: Any, rows: int, length: int) -> None:
        self._gpu, self._plan, self._context, self._stream = gpu, plan, context, stream
        self._graph: Any = None
        self._inputs: dict[str, _Buffer] = {}
        for tensor in plan.manifest.inputs:
            shape = resolved(tensor.shape, rows, length)
            plan.check(context.set_input_shape(tensor.name, shape), f"the shape {shape} of {tensor.name!r}")
            self._inputs[tensor.name] = self._address(tensor, shape)
        if missing := context.infer_shapes():
            raise EngineError(f"TensorRT cannot tell the shapes that follow from {', '.join(missing)}").of(
                "tensorrt.shapes_unknown"
            )
        self._outputs = {
            tensor.name: self._address(tensor, tuple(context.get_tensor_shape(tensor.name)))
            for tensor in plan.manifest.outputs
        }

    def _address(self, tensor: Tensor, shape: Shape) -> _Buffer:
        if min(shape) < 0:
            raise EngineError(f"the shape {list(shape)} of {tensor.name!r} depends on values: give it a fixed one").of(
                "shape.depends_on_values"
            )
        buffer = _Buffer.allocate(self._gpu, shape, tensor.dtype)
        placed = self._context.set_tensor_address(tensor.name, buffer.device.data_ptr())
        self._plan.check(placed, f"the buffer of {tensor.name!r}")
        return buffer

    def capture(self) -> Self:
        """Run once, because the first run allocates memory. Then record the launches of a second run."""
        self._launch()
        self._stream.synchronize()
        if not self._plan.captures_graphs:
            graph = self._gpu.cuda.CUDAGraph()
            # Thread-local, because other lanes may run and allocate memory meanwhile.
            with self._gpu.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._launch()
            self._graph = graph
        return self

    def run(self, inputs: Tensors) -> Tensors:
        """Fill the buffers, run, and read them. Padding repeats the last row, because its values are valid."""
        for name, buffer in self._inputs.items():
            rows = len(inputs[name])
            host = buffer.host.numpy()
            given, expected = inputs[name].shape[1:], host.shape[1:]
            if given != expected:  # NumPy would broadcast a size of 1
                raise RequestError(
                    f"input {name!r} has rows of shape {list(given)}, expected {list(expected)}: the sizes that vary "
                    "must be equal in all inputs"
                ).of("batch.lengths", name)
            host[:rows] = inputs[name]
            host[rows:] = inputs[name][-1:]
            buffer.device.copy_(buffer.host, non_blocking=True)
        self._launch()
        for buffer in self._outputs.values():
            buffer.host.copy_(buffer.device, non_blocking=True)
        self._stream.synchronize()
        # These are copies, because the next batch overwrites the buffers.
        return {name: np.array(buffer.host.numpy()[:rows]) for name, buffer in self._outputs.items()}

    def _launch(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self._plan.check(self._context.execute_async_v3(self._stream.cuda_stream), "the batch")
