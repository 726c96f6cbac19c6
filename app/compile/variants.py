"""The variants that a recipe requests: an engine of this machine with an ONNX file, or PyTorch with the module."""

from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, ConfigDict

from app.config import PLAN_ENGINES, CompileConfig, ComputePrecision, EngineName
from app.engines.architecture import Device, compute_capability
from app.engines.registry import installed_engines, require_installed, runs_module, runs_plans
from app.errors import CompileError, EngineError

_UNCHANGED: dict[ComputePrecision, ComputePrecision] = {name: name for name in ("fp32", "bf16", "fp16", "int8")}
_FOR_TENSORRT = {**_UNCHANGED, "fp8": "fp8"}
_FILES: dict[tuple[EngineName, Device], dict[ComputePrecision, ComputePrecision]] = {
    # OpenVINO lowers a float32 file by itself. The others take every type from the file.
    ("openvino", "cpu"): {"fp32": "fp32", "bf16": "fp32", "fp16": "fp32", "int8": "int8"},
    ("onnxruntime", "cpu"): {"fp32": "fp32", "fp16": "fp16", "int8": "int8"},  # no bfloat16 kernels
    ("onnxruntime", "gpu"): _UNCHANGED,
    ("tensorrt", "gpu"): _FOR_TENSORRT,
    ("tensorrt_rtx", "gpu"): _FOR_TENSORRT,
    ("torch", "cpu"): {"fp32": "fp32"},
    ("torch", "gpu"): {"fp32": "fp32"},
}
"""For each engine: the precision in which it computes, and the precision of the ONNX file that it needs for that."""

BUILT_AHEAD: Final = "tensorrt_rtx"
"""The engine whose TensorRT plans are built for ``compile.targets``, on any machine."""


class Variant(BaseModel):
    """An engine that computes in a precision, on a device of this machine."""

    model_config = ConfigDict(frozen=True)

    engine: EngineName
    precision: ComputePrecision
    device: Device
    sparse: bool = False
    """Whether its weights have 2-of-4 sparsity."""

    baseline: bool = False
    """Whether it is only measured for comparison, and never published."""

    @property
    def file(self) -> ComputePrecision:
        """The precision of the ONNX file that the engine needs."""
        return _FILES[self.engine, self.device][self.precision]

    @property
    def runs_module(self) -> bool:
        """Whether the engine runs the trained PyTorch module instead of an ONNX file."""
        return runs_module(self.engine)

    def __str__(self) -> str:
        return f"{self.engine} {self.precision}{' 2-of-4' * self.sparse}{' on the GPU' * (self.device == 'gpu')}"


class Skipped(BaseModel):
    """A requested variant that cannot run on this machine."""

    engine: EngineName
    precision: ComputePrecision
    reason: str

    def __str__(self) -> str:
        return f"{self.engine} {self.precision}: not run: {self.reason}"


@dataclass(frozen=True)
class RequestedVariants:
    """A recipe's variants to run, precisions for TensorRT plans built ahead of time, and skipped variants."""

    variants: list[Variant]
    built_ahead: list[ComputePrecision]
    skipped: list[Skipped]

    @property
    def int8_engines(self) -> list[EngineName]:
        """The engines on which int8 files are evaluated while they are made, beside the reference runtime.

        The reference runtime is ONNX Runtime, and TensorRT would need a new plan for each attempt.
        """
        return [variant.engine for variant in self.variants if variant.engine == "openvino" and variant.file == "int8"]

    @property
    def exported(self) -> bool:
        """Whether an ONNX file is needed. The module itself also runs if it cannot be exported."""
        return bool(self.built_ahead) or not all(variant.runs_module for variant in self.variants)

    @property
    def calibrated(self) -> bool:
        """Whether a file is needed that is calibrated with samples."""
        files = {variant.file for variant in self.variants} | set(self.built_ahead)
        return not files.isdisjoint(("int8", "fp8"))


def requested_variants(config: CompileConfig) -> RequestedVariants:
    """Resolve a recipe's engines and precisions on this machine.

    Raises:
        EngineError: a named engine is not installed.
        CompileError: a named engine needs a GPU, or a key needs an engine, that this machine lacks.
    """
    has_gpu = compute_capability() is not None
    pairs = _automatic(has_gpu) if config.engines == "auto" else _named(config.engines, bool(config.targets), has_gpu)
    if config.engines == "auto" and not any(engine in PLAN_ENGINES for engine, _ in pairs):
        _refuse_keys_of_tensorrt(config)
    requested = RequestedVariants([], config.precisions if config.targets else [], [])
    for precision in config.precisions:
        for engine, device in pairs:
            if precision in _FILES[engine, device]:
                sparse = config.sparsity != "none" and runs_plans(engine)
                baseline = config.engines == "auto" and runs_module(engine)
                variant = Variant(engine=engine, precision=precision, device=device, sparse=sparse, baseline=baseline)
                requested.variants.append(variant)
            elif not runs_module(engine):
                reason = f"on the {device.upper()} it computes in {', '.join(_FILES[engine, device])}"
                requested.skipped.append(Skipped(engine=engine, precision=precision, reason=reason))
    # A baseline alone could never be published.
    if all(variant.baseline for variant in requested.variants):
        raise CompileError(
            f"compile.engines {config.engines} with compile.precisions {config.precisions} give no variant that runs "
            "here and can be published: name others, such as openvino and fp32, or compile where the engines run"
        ).of("variants.none", "compile.engines")
    return requested


def _refuse_keys_of_tensorrt(config: CompileConfig) -> None:
    """Refuse keys that no engine of this machine supports. (With named engines, the recipe itself is refused.)"""
    for key, is_set in (
        ("precisions name fp8", "fp8" in config.precisions),
        ("sparsity is 2-of-4", config.sparsity != "none"),
        (f"workspace_mb is {config.workspace_mb}", config.workspace_mb is not None),
    ):
        if is_set:
            raise CompileError(
                f"compile.{key}, which only {' and '.join(PLAN_ENGINES)} support, and none of them runs here: leave it "
                f"out, or name {BUILT_AHEAD} in compile.engines with compile.targets"
            ).of("tensorrt.missing", f"compile.{key.split()[0]}")


def _automatic(has_gpu: bool) -> list[tuple[EngineName, Device]]:
    pairs: list[tuple[EngineName, Device]] = [("openvino", "cpu"), ("onnxruntime", "cpu"), ("torch", "cpu")]
    if has_gpu:
        installed = installed_engines()
        # One of them is enough, because each takes minutes to build plans.
        pairs += [(engine, "gpu") for engine in PLAN_ENGINES if engine in installed][:1]
        pairs += [("onnxruntime", "gpu")] if _has_cuda() else []
        pairs += [("torch", "gpu")]
    return pairs


def _named(engines: list[EngineName], ahead: bool, has_gpu: bool) -> list[tuple[EngineName, Device]]:
    pairs: list[tuple[EngineName, Device]] = []
    for engine in engines:
        try:
            require_installed(engine)
        except EngineError as error:
            raise EngineError(f"compile.engines names {engine}: {error}").of(error.rule, "compile.engines") from error
        here = [device for name, device in _FILES if name == engine and _is_here(engine, device, has_gpu)]
        if not here and not (engine == BUILT_AHEAD and ahead):
            ahead_of_time = "name the GPUs to build for in compile.targets"
            hint = ahead_of_time if engine == BUILT_AHEAD else "reserve one with compile.gpus=1, or leave it out"
            raise CompileError(f"compile.engines names {engine}, and this machine has no GPU: {hint}").of(
                "gpu.missing", "compile.engines"
            )
        pairs += [(engine, device) for device in here]
    return pairs


def _is_here(engine: EngineName, device: Device, has_gpu: bool) -> bool:
    return device == "cpu" or (has_gpu and (engine != "onnxruntime" or _has_cuda()))


def _has_cuda() -> bool:
    """Return True if ONNX Runtime was built for CUDA."""
    import onnxruntime  # slow, and only a machine with a GPU needs it

    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()
