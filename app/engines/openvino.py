"""OpenVINO: the engine for CPUs."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock

import openvino
from openvino.utils.data_helpers.wrappers import OVDict

from app.checksums import sha256_of_file
from app.config import ComputePrecision
from app.engines.base import EngineSettings, PooledEngine, Signature, require_finite, spec_of
from app.engines.cache import CacheFile
from app.engines.openvino_indices import FAULT, read_guarded
from app.errors import EngineError
from app.tensors import Tensors, TensorSpec

_DEVICE = "CPU"
_HINTS: dict[ComputePrecision, str] = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "int8": "f32"}
_OUTPUT_SUFFIX = "/sink_port_0"
"""Ends the name of an output's node."""

_CAPABILITIES = {"bf16": "BF16", "fp16": "FP16", "int8": "INT8"}
_DTYPES = {
    "boolean": "bool",
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"{sign}{bits}": f"{name}{bits}" for sign, name in (("i", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)},
}


class OpenVinoEngine(PooledEngine["_Stream"]):
    """A compiled model with one inference request for each stream.

    In an int8 file the quantized layers run in int8, the others in float32. If only a layer's weights are in int8,
    OpenVINO rounds the layer's inputs to 8 bits at run time, in groups of 32 with a scale each
    (DYNAMIC_QUANTIZATION_GROUP_SIZE).
    """

    name = "openvino"
    version: str = openvino.__version__

    def __init__(self, path: Path, settings: EngineSettings) -> None:
        """Load an ONNX file.

        Raises:
            EngineError: the file cannot be loaded or has a type that numpy lacks; or this CPU does not compute in the
                precision, for which OpenVINO would silently use float32.
        """
        if settings.device != "cpu":
            raise EngineError("OpenVINO runs on the CPU here: choose the device cpu, or another engine").of(
                "device.unsupported"
            )
        self._graph = _Graph(partial(_load, path, settings))
        model = self._graph.model()
        outputs = [port for port in model.outputs if FAULT not in port.get_names()]
        self._tells_faults = len(outputs) < len(model.outputs)
        signature = Signature(tuple(map(_limited, _specs(path, model.inputs))), _specs(path, outputs))
        super().__init__(signature, (_Stream(self._graph) for _ in range(settings.streams)))

    def close(self) -> None:
        super().close()
        self._graph.close()

    def _run(self, member: "_Stream", inputs: Tensors) -> Tensors:
        require_finite(inputs, "OpenVINO")
        results = member.run(inputs)
        if self._tells_faults and results[FAULT].any():
            raise EngineError("an index is out of range: give indices in range, or a shorter input").of("index.range")
        return {spec.name: results[spec.name] for spec in self.signature.outputs}


class _Graph:
    """A compiled model that is loaded again after a failed batch.

    If a batch fails halfway, OpenVINO's graph keeps its sizes and would use them for later batches.
    """

    def __init__(self, load: Callable[[], openvino.CompiledModel]) -> None:
        self._load = load
        self._lock = Lock()
        self._model: openvino.CompiledModel | None = None

    def model(self) -> openvino.CompiledModel:
        """Return the model, and load it if necessary. Raises EngineError if it cannot be loaded."""
        with self._lock:
            if self._model is None:
                self._model = load_apart(self._load)
            return self._model

    def discard(self, failed: openvino.CompiledModel) -> bool:
        """Free the model, so that the next batch loads it again. Return False if that has been done already."""
        with self._lock:
            is_used = failed is self._model
            if is_used:
                self._model = None
            return is_used

    def close(self) -> None:
        """Free the model."""
        with self._lock:
            self._model = None


class _Stream:
    """An inference request of a graph. It is created again after the graph has been loaded again."""

    def __init__(self, graph: _Graph) -> None:
        self._graph = graph
        self._opened: tuple[openvino.CompiledModel, openvino.InferRequest] | None = None
        self._open()

    def run(self, inputs: Tensors) -> OVDict:
        """Return copies of the outputs. Raises RuntimeError if OpenVINO cannot compute them."""
        while True:
            model, request = self._open()
            try:
                # With one thread, the synchronous call of OpenVINO 2026.4 loses errors: it returns an earlier batch's
                # outputs. The inputs outlive the call, so they need not be copied.
                request.start_async(dict(inputs), share_inputs=True)
                request.wait()
                results = request.results
            except RuntimeError:
                is_first = self._graph.discard(model)
                # Free the memory before the graph is loaded again. The error keeps this frame alive.
                self._opened = None
                del model, request
                if is_first:
                    raise
                continue
            # A batch of another stream that failed meanwhile may have changed the sizes of this one.
            if self._graph.model() is model:
                return results

    def _open(self) -> tuple[openvino.CompiledModel, openvino.InferRequest]:
        model = self._graph.model()
        if self._opened is None or self._opened[0] is not model:
            self._opened = model, model.create_infer_request()
        return self._opened


def load_apart(load: Callable[[], openvino.CompiledModel]) -> openvino.CompiledModel:
    """Return the model of ``load``, which runs on a thread that ends.

    On a CPU with AMX, OpenVINO gives the thread that loads a model a signal stack. It frees that stack with the model,
    on whatever thread: the next signal to the loading thread would then kill the process.
    """
    with ThreadPoolExecutor(1, "openvino") as loading:
        return loading.submit(load).result()


def _load(path: Path, settings: EngineSettings) -> openvino.CompiledModel:
    """Compile an ONNX file. Raises EngineError, which names the file, if OpenVINO refuses it."""
    core = openvino.Core()
    _check_precision(core, settings.precision)
    properties: dict[str, str | int | bool] = {
        "INFERENCE_PRECISION_HINT": _HINTS[settings.precision],
        "INFERENCE_NUM_THREADS": settings.threads * settings.streams,
        "NUM_STREAMS": settings.streams,
        # With pinning, every process would start at the first core, and all replicas would share it.
        "ENABLE_CPU_PINNING": False,
    }
    try:
        return _compile(core, path, properties, settings)
    except RuntimeError as error:
        raise EngineError(f"OpenVINO cannot load {str(path)!r}: {error}").of("engine.not_loaded") from error


def _check_precision(core: openvino.Core, precision: ComputePrecision) -> None:
    capabilities = core.get_property(_DEVICE, "OPTIMIZATION_CAPABILITIES")
    if precision not in _HINTS or _CAPABILITIES.get(precision, "FP32") not in capabilities:
        raise EngineError(
            f"this CPU, {core.get_property(_DEVICE, 'FULL_DEVICE_NAME').strip()}, does not compute in {precision}: "
            f"OpenVINO finds {', '.join(capabilities)}; choose a precision among them"
        ).of("precision.unsupported")


def _compile(
    core: openvino.Core, path: Path, properties: dict[str, str | int | bool], settings: EngineSettings
) -> openvino.CompiledModel:
    """Compile an ONNX file, or read an earlier result for the same content from the cache.

    OpenVINO's own CACHE_DIR does not help: its key is the file's path, which changes whenever a version is fetched.
    """
    if settings.cache is None:
        return core.compile_model(read_guarded(core, path), _DEVICE, properties)
    cpu = [str(core.get_property(_DEVICE, name)) for name in ("FULL_DEVICE_NAME", "OPTIMIZATION_CAPABILITIES")]
    content = settings.sha256 or sha256_of_file(path)
    kept = CacheFile.of(settings.cache, "openvino, indices 3", openvino.__version__, *cpu, str(properties), content)
    if (compiled := kept.read()) is not None:
        with suppress(RuntimeError):  # written by another build of the same version
            return core.import_model(compiled, _DEVICE, properties)
    model = core.compile_model(read_guarded(core, path), _DEVICE, properties)
    kept.write(model.export_model().getvalue())
    return model


def _specs(path: Path, ports: list[openvino.ConstOutput]) -> tuple[TensorSpec, ...]:
    specs = []
    for port in ports:
        if (sizes := port.get_partial_shape()).rank.is_dynamic:
            raise EngineError(f"{str(path)!r}: the rank of {_name_of(port)!r} varies: export it with a fixed one").of(
                "rank.unsupported"
            )
        shape = tuple(size.get_length() if size.is_static else -1 for size in sizes)
        specs.append(spec_of(path, _name_of(port), port.get_element_type().get_type_name(), _DTYPES, shape))
    return tuple(specs)


def _limited(spec: TensorSpec) -> TensorSpec:
    """Return the spec of an input, limited to 32 bits because OpenVINO truncates larger integers."""
    if spec.dtype.name not in ("int64", "uint64", "uint32"):
        return spec
    return replace(spec, values_from=0 if spec.dtype.kind == "u" else -(2**31), values_below=2**31)


def _name_of(port: openvino.ConstOutput) -> str:
    """Return the name of an input or output in the ONNX file.

    OpenVINO removes a node that changes nothing, and then its port has the names of both sides.
    """
    named = str(port.get_node().get_friendly_name()).removesuffix(_OUTPUT_SUFFIX)
    return named if named in port.get_names() else str(port.get_any_name())
