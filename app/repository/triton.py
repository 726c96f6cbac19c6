"""Triton's configuration of a model: ``config.pbtxt``, in protobuf's text format.

The message is ``inference.ModelConfig`` of https://github.com/triton-inference-server/common/blob/main/protobuf/model_config.proto
"""

import json
from dataclasses import dataclass, field

from app.config import ComputePrecision
from app.engines.registry import runs_plans
from app.engines.tensorrt.profiles import optimization_profiles
from app.repository.manifest import Manifest
from app.tensors import Tensor

CONFIG_FILE = "config.pbtxt"


@dataclass(frozen=True)
class _Backend:
    """The backend of Triton that runs an engine's models."""

    platform: str | None = None
    threads: str | None = None
    """The parameter that limits the threads of an instance."""

    parameters: dict[str, str] = field(default_factory=dict)
    by_precision: dict[ComputePrecision, dict[str, str]] = field(default_factory=dict)
    """Additional parameters of models in one precision."""


_BACKENDS = {
    "onnxruntime": _Backend("onnxruntime_onnx", "intra_op_thread_count"),
    # This backend fixes the batch at max_batch_size, and refuses every other size unless it may pad.
    "openvino": _Backend(
        threads="INFERENCE_NUM_THREADS",
        parameters={"NUM_STREAMS": "1", "ENABLE_BATCH_PADDING": "YES"},
        by_precision={"bf16": {"HINT_BF16": "YES"}},  # its only hint
    ),
    "tensorrt": _Backend("tensorrt_plan"),
}
BACKENDS = tuple(_BACKENDS)
"""The engines whose models Triton runs."""


def config_of(manifest: Manifest) -> str | None:
    """Return the configuration that serves this version; None if Triton has no backend for its engine."""
    return description_of(manifest) if manifest.engine_key.engine in _BACKENDS else None


def description_of(manifest: Manifest) -> str:
    """Describe this version as a configuration, even if its engine has no backend in Triton."""
    backend = _BACKENDS.get(manifest.engine_key.engine, _Backend())
    batched = all(tensor.shape[:1] == (-1,) for tensor in (*manifest.inputs, *manifest.outputs))
    parameters = backend.parameters | backend.by_precision.get(manifest.engine_key.precision, {})
    if backend.threads:
        parameters[backend.threads] = str(manifest.serving.threads)
    lines = [
        f"name: {_quoted(manifest.name)}",
        *([f"platform: {_quoted(backend.platform)}"] if backend.platform else []),
        f"backend: {_quoted(manifest.engine_key.engine)}",
        f"default_model_filename: {_quoted(manifest.engine_key.file)}",
        f"version_policy {{ specific {{ versions: [{manifest.version}] }} }}",
        f"max_batch_size: {manifest.serving.max_batch_size if batched else 0}",
        *(_tensor("input", tensor, batched) for tensor in manifest.inputs),
        *(_tensor("output", tensor, batched) for tensor in manifest.outputs),
        *([_dynamic_batching(manifest)] if batched else []),
        _instances(manifest),
        *(
            f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}"
            for key, value in parameters.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _instances(manifest: Manifest) -> str:
    profiles = f" profile: {json.dumps(_profiles(manifest))}" if runs_plans(manifest.engine_key.engine) else ""
    return (
        f"instance_group {{ count: {manifest.serving.replicas} kind: KIND_{manifest.engine_key.device.upper()}"
        f"{profiles} }}"
    )


def _profiles(manifest: Manifest) -> list[str]:
    """Return the names of a plan's optimization profiles. Without them, Triton uses only the first.

    Triton opens each profile with ``max_batch_size`` rows, so profiles for more rows are left out.
    """
    profiles = optimization_profiles(manifest.engine_key.profile)
    return [str(index) for index, ranges in enumerate(profiles) if ranges.min_rows <= manifest.serving.max_batch_size]


def _dynamic_batching(manifest: Manifest) -> str:
    preferred = list(manifest.serving.preferred_batch_sizes)
    sizes = f"preferred_batch_size: {preferred} " if preferred else ""
    return f"dynamic_batching {{ {sizes}max_queue_delay_microseconds: {manifest.serving.timeout_us} }}"


def _tensor(kind: str, tensor: Tensor, batched: bool) -> str:
    """Return one input or output. Triton's ``dims`` exclude the batch, and need at least one other size."""
    dims = list(tensor.shape[1:] if batched else tensor.shape)
    sizes = f"dims: {dims}" if dims else "dims: [1] reshape { shape: [] }"
    data_type = tensor.dtype.replace("bfloat", "bf").replace("float", "fp").upper()
    return f"{kind} {{ name: {_quoted(tensor.name)} data_type: TYPE_{data_type} {sizes} }}"


def _quoted(text: str) -> str:
    """Quote as JSON does: protobuf's text format has the same escapes."""
    return json.dumps(text, ensure_ascii=False)
