"""A GPU, and an execution context of TensorRT on it, for machines that have none: memory is the host's.

The context sums what the mask leaves of the ids of each row, through the addresses that it was given, as a plan would.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class Graph:
    """What was launched while it was recorded, to be launched again."""

    def __init__(self) -> None:
        self.launched: list[Callable[[], None]] = []
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for launch in self.launched:
            launch()


class Gpu:
    """The parts of the module torch that a lane uses; ``refuses`` names the call that finds no memory."""

    uint8, int64, float32 = torch.uint8, torch.int64, torch.float32

    def __init__(self, refuses: str = "") -> None:
        self._refuses = refuses
        self.graphs: list[Graph] = []
        self.recording: Graph | None = None
        self.cuda = SimpleNamespace(
            Stream=self._stream, stream=self._current, CUDAGraph=self._graph, graph=self._record
        )

    def empty(self, size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        assert device == "cuda"
        if self._refuses == "empty":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.empty(size, dtype=dtype)

    def zeros(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu", pin_memory: bool = False
    ) -> torch.Tensor:
        assert (device == "cuda") is not pin_memory
        return torch.zeros(shape, dtype=dtype)

    def _stream(self) -> Any:
        return SimpleNamespace(cuda_stream=7, synchronize=lambda: None)

    @contextmanager
    def _current(self, stream: Any) -> Iterator[None]:
        yield

    def _graph(self) -> Graph:
        self.graphs.append(Graph())
        return self.graphs[-1]

    @contextmanager
    def _record(self, graph: Graph, stream: Any, capture_error_mode: str) -> Iterator[None]:
        self.recording = graph
        yield
        self.recording = None


class Context:
    """An execution context; ``refuses`` names the call that returns False, and says why in ``messages``."""

    def __init__(self, gpu: Gpu, refuses: str, messages: list[str]) -> None:
        self._gpu, self._refuses, self._messages = gpu, refuses, messages
        self.launches = 0
        self.profile = -1
        self.scratch = (0, 0)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_device_memory(self, memory: int, size: int) -> None:
        self.scratch = (memory, size)

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return self._does("set_optimization_profile_async")

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._shapes[name] = shape
        return self._does("set_input_shape")

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return self._does("set_tensor_address")

    def infer_shapes(self) -> list[str]:
        return ["attention_mask"] if self._refuses == "infer_shapes" else []

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if self._refuses == "get_tensor_shape":
            return (-1, 1)
        return (self._shapes["input_ids"][0], 1)

    def execute_async_v3(self, stream: int) -> bool:
        self.launches += 1
        if self._gpu.recording is None:
            self._compute()
        else:
            self._gpu.recording.launched.append(self._compute)
        return self._does("execute_async_v3")

    def _does(self, call: str) -> bool:
        if self._refuses == call:
            self._messages.append("the library's reason")
        return self._refuses != call

    def ids(self) -> NDArray[np.int64]:
        """What lies on the device."""
        return self._at("input_ids", ctypes.c_int64, self._shapes["input_ids"])

    def _compute(self) -> None:
        shape = self._shapes["input_ids"]
        ids, mask = (self._at(name, ctypes.c_int64, shape) for name in ("input_ids", "attention_mask"))
        self._at("logits", ctypes.c_float, (shape[0], 1))[:] = (ids * mask).sum(-1, keepdims=True)

    def _at(self, name: str, kind: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        size = int(np.prod(shape))
        return np.ctypeslib.as_array((kind * size).from_address(self._addresses[name])).reshape(shape)
