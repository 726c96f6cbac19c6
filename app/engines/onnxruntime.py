"""ONNX Runtime: the reference runtime that checks every variant's numbers, and an engine for CUDA."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from app.engines.architecture import usable_cores
from app.engines.base import EngineSettings, PooledEngine, Signature, require_finite, spec_of
from app.errors import EngineError, RequestError
from app.tensors import Tensors, TensorSpec

_DTYPES = {
    "tensor(bool)": "bool",
    "tensor(string)": "object",
    "tensor(float16)": "float16",
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    **{f"tensor({sign}int{bits})": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
_PROVIDERS = {"cpu": "CPUExecutionProvider", "gpu": "CUDAExecutionProvider"}
# TF32, the default, has a mantissa of only 10 bits.
_OPTIONS = {"CUDAExecutionProvider": {"use_tf32": "0"}}


class OnnxRuntimeEngine(PooledEngine[onnxruntime.InferenceSession]):
    """One session, which runs ``settings.streams`` batches concurrently.

    The file decides the precision, whatever ``settings.precision`` says. All streams share one pool of threads, so a
    batch that runs alone uses all of them.
    """

    name = "onnxruntime"
    version: str = onnxruntime.__version__

    def __init__(self, path: Path, settings: EngineSettings, entries: Mapping[str, str] | None = None) -> None:
        """Load an ONNX file.

        Args:
            entries: entries of ONNX Runtime's session configuration that our settings lack.

        Raises:
            EngineError: the file cannot be loaded or has a type that numpy lacks, or the device is missing.
        """
        options = onnxruntime.SessionOptions()
        # The calling thread of each stream computes, too.
        options.intra_op_num_threads = (settings.threads - 1) * settings.streams + 1
        options.inter_op_num_threads = 1
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        for key, value in (entries or {}).items():
            options.add_session_config_entry(key, value)
        session = _open(path, options, _PROVIDERS[settings.device])
        signature = Signature(_specs(path, session.get_inputs()), _specs(path, session.get_outputs()))
        self._names = [spec.name for spec in signature.outputs]
        self._strings = [spec.name for spec in signature.inputs if spec.dtype.hasobject]
        self._is_quantized = settings.precision in ("int8", "fp8")
        # A session may be called from several threads, so all streams share it.
        super().__init__(signature, [session] * settings.streams)

    def _run(self, member: onnxruntime.InferenceSession, inputs: Tensors) -> Tensors:
        if self._is_quantized:
            require_finite(inputs, "a quantized layer")
        texts = {name: _as_texts(name, inputs[name]) for name in self._strings}
        return dict(zip(self._names, member.run(self._names, {**inputs, **texts}), strict=True))


def _as_texts(name: str, strings: NDArray[Any]) -> NDArray[Any]:
    """Return an array of ``str``. ONNX Runtime takes the ``repr`` of ``bytes``. Raises RequestError, not UTF-8."""
    texts = np.empty(strings.size, np.object_)
    try:
        texts[:] = [item.decode() if isinstance(item, bytes) else item for item in strings.flat]
    except UnicodeDecodeError as error:
        raise RequestError(f"input {name!r} has a string that is not UTF-8 ({error}): encode it in UTF-8").of(
            "text.encoding", name
        ) from error
    return texts.reshape(strings.shape)


def open_oracle(path: Path, threads: int | None = None) -> OnnxRuntimeEngine:
    """Open an engine on the CPU that runs the file node by node, by default on all cores.

    In quantized files it runs each QuantizeLinear and DequantizeLinear as written, in float32 between them. If ONNX
    Runtime fuses them, it fails on float8 and is far off on float16 scales.
    """
    return OnnxRuntimeEngine(
        path, EngineSettings(threads=threads or usable_cores()), {"session.disable_quant_qdq": "1"}
    )


def _open(path: Path, options: onnxruntime.SessionOptions, provider: str) -> onnxruntime.InferenceSession:
    if provider not in (available := onnxruntime.get_available_providers()):
        raise EngineError(
            f"this ONNX Runtime has no {provider}, only {', '.join(available)}: install the package onnxruntime-gpu "
            "in place of onnxruntime, or choose the device cpu"
        ).of("provider.missing")
    try:
        session = onnxruntime.InferenceSession(path, options, providers=[(provider, _OPTIONS.get(provider, {}))])
    except Exception as error:  # ONNX Runtime's error classes are not public
        raise EngineError(f"ONNX Runtime cannot load {str(path)!r}: {error}").of("engine.not_loaded") from error
    if (given := session.get_providers()[0]) != provider:
        # ONNX Runtime falls back silently, or with a line on stderr.
        raise EngineError(
            f"ONNX Runtime runs {str(path)!r} with {given} where {provider} was asked for: its libraries cannot be "
            "loaded; see the lines above"
        ).of("provider.not_loaded")
    return session


def _specs(path: Path, nodes: list[onnxruntime.NodeArg]) -> tuple[TensorSpec, ...]:
    return tuple(
        spec_of(path, node.name, node.type, _DTYPES, [size if isinstance(size, int) else -1 for size in node.shape])
        for node in nodes
    )
