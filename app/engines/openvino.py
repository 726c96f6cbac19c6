"""OpenVINO: the engine for CPUs."""

import threading
from pathlib import Path

import numpy as np
import openvino

from app.engines.base import Signature
from app.errors import EngineError
from app.tensors import Tensors, TensorSpec, check_tensors


class OpenVinoEngine:
    """A compiled model with one stream, in float32."""

    name = "openvino"
    version: str = openvino.__version__

    def __init__(self, path: Path, threads: int) -> None:
        # Written out: by default OpenVINO computes in bfloat16 where the CPU can.
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
        try:
            self._model = openvino.Core().compile_model(path, "CPU", settings)
        except RuntimeError as error:
            raise EngineError(f"OpenVINO cannot load {str(path)!r}: {error}") from error
        self._signature = Signature(_specs(self._model.inputs), _specs(self._model.outputs))
        self._request = self._model.create_infer_request()
        self._lock = threading.Lock()

    @property
    def signature(self) -> Signature:
        return self._signature

    def infer(self, inputs: Tensors) -> Tensors:
        check_tensors(inputs, self._signature.inputs)
        with self._lock:
            results = self._request.infer(dict(inputs), share_inputs=True)
            return {spec.name: results[spec.name] for spec in self._signature.outputs}

    def close(self) -> None:
        with self._lock:
            del self._request, self._model


def _specs(ports: list[openvino.ConstOutput]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            port.get_any_name(),
            np.dtype(port.get_element_type().to_dtype()),
            tuple(size.get_length() if size.is_static else -1 for size in port.get_partial_shape()),
        )
        for port in ports
    )
