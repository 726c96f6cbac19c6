"""ONNX Runtime on the CPU: the oracle that every variant's numbers are checked against."""

from pathlib import Path

import numpy as np
import onnxruntime

from app.engines.base import Signature
from app.errors import EngineError
from app.tensors import Tensors, TensorSpec, check_tensors

_DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64}


class OnnxRuntimeEngine:
    """A session on the CPU."""

    name = "onnxruntime"
    version: str = onnxruntime.__version__

    def __init__(self, path: Path, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        try:
            self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its error classes are not public
            raise EngineError(f"ONNX Runtime cannot load {str(path)!r}: {error}") from error
        self._signature = Signature(_specs(self._session.get_inputs()), _specs(self._session.get_outputs()))

    @property
    def signature(self) -> Signature:
        return self._signature

    def infer(self, inputs: Tensors) -> Tensors:
        check_tensors(inputs, self._signature.inputs)
        names = [spec.name for spec in self._signature.outputs]
        return dict(zip(names, self._session.run(names, dict(inputs)), strict=True))

    def close(self) -> None:
        del self._session


def _specs(nodes: list[onnxruntime.NodeArg]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            node.name,
            np.dtype(_DTYPES[node.type]),
            tuple(size if isinstance(size, int) else -1 for size in node.shape),
        )
        for node in nodes
    )
