"""Which variants a recipe asks for on this machine: a file of one precision, or the module, run by an engine."""

from dataclasses import dataclass
from typing import Final

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from app.config import PLAN_ENGINES, CompileConfig, ComputePrecision, EngineName
from app.engines.architecture import Device, compute_capability
from app.engines.registry import installed_engines, require_installed, runs_module, runs_plans
from app.errors import CompileError, EngineError

_AS_THEY_ARE: dict[ComputePrecision, ComputePrecision] = {name: name for name in ("fp32", "bf16", "fp16", "int8")}
_FOR_TENSORRT = {**_AS_THEY_ARE, "fp8": "fp8"}
_FILES: dict[tuple[EngineName, Device], dict[ComputePrecision, ComputePrecision]] = {
    # OpenVINO lowers a float32 file by itself; the others take every type from the file.
    ("openvino", "cpu"): {"fp32": "fp32", "bf16": "fp32", "fp16": "fp32", "int8": "int8"},
    ("onnxruntime", "cpu"): {"fp32": "fp32", "fp16": "fp16", "int8": "int8"},  # it has no kernels for bfloat16
    ("onnxruntime", "gpu"): _AS_THEY_ARE,
    ("tensorrt", "gpu"): _FOR_TENSORRT,
    ("tensorrt_rtx", "gpu"): _FOR_TENSORRT,
    ("torch", "cpu"): {"fp32": "fp32"},
    ("torch", "gpu"): {"fp32": "fp32"},
}
"""The precision of the file that an engine takes to compute in a precision."""

BUILT_AHEAD: Final = "tensorrt_rtx"
"""The engine whose plans are built for ``compile.targets``, on any machine."""


class Variant(BaseModel):
    """An engine that computes in a precision, on a device of this machine."""

    model_config = ConfigDict(frozen=True)

    engine: EngineName
    precision: ComputePrecision
    device: Device
    sparse: bool = False
    """Whether two of four of its weights are zero."""

    baseline: bool = Field(default=False, validation_alias=AliasChoices("baseline", "yardstick"))
    """Whether it is only measured, to compare with. Earlier reports call this ``yardstick``."""

    @property
    def file(self) -> ComputePrecision:
        """The precision of the file that the engine takes."""
        return _FILES[self.engine, self.device][self.precision]

    @property
    def runs_module(self) -> bool:
        """Whether it is the module, as it was trained."""
        return runs_module(self.engine)

    def __str__(self) -> str:
        return f"{self.engine} {self.precision}{' 2:4' * self.sparse}{' on the GPU' * (self.device == 'gpu')}"


class Skipped(BaseModel):
    """A variant that was asked for and could not be run here."""

    engine: EngineName
    precision: ComputePrecision
    reason: str

    def __str__(self) -> str:
        return f"{self.engine} {self.precision}: not run: {self.reason}"


@dataclass(frozen=True)
class Wanted:
    """What a recipe asks for: variants to run, precisions to build plans in ahead of time, and what cannot be."""

    variants: list[Variant]
    built_ahead: list[ComputePrecision]
    skipped: list[Skipped]

    @property
    def int8_engines(self) -> list[EngineName]:
        """The engines that int8 files are tried on while they are made, beside the oracle.

        ONNX Runtime is the oracle, and TensorRT would need a plan for each try.
        """
        return [each.engine for each in self.variants if each.engine == "openvino" and each.file == "int8"]

    @property
    def exported(self) -> bool:
        """Whether an ONNX file is needed: the module itself also runs where it cannot be exported."""
        return bool(self.built_ahead) or not all(each.runs_module for each in self.variants)

    @property
    def calibrated(self) -> bool:
        """Whether a file is needed that takes samples to make."""
        files = {each.file for each in self.variants} | set(self.built_ahead)
        return not files.isdisjoint(("int8", "fp8"))


def wanted_variants(config: CompileConfig) -> Wanted:
    """Resolve a recipe's engines and precisions on this machine.

    Raises:
        EngineError: an engine that is named is not installed.
        CompileError: one needs a GPU, or a key needs an engine, that is not here.
    """
    has_gpu = compute_capability() is not None
    places = _automatic(has_gpu) if config.engines == "auto" else _named(config.engines, bool(config.targets), has_gpu)
    if config.engines == "auto" and not any(engine in PLAN_ENGINES for engine, _ in places):
        _refuse_keys_of_tensorrt(config)
    wanted = Wanted([], config.precisions if config.targets else [], [])
    for precision in config.precisions:
        for engine, device in places:
            if precision in _FILES[engine, device]:
                sparse = config.sparsity != "none" and runs_plans(engine)
                baseline = config.engines == "auto" and runs_module(engine)
                variant = Variant(engine=engine, precision=precision, device=device, sparse=sparse, baseline=baseline)
                wanted.variants.append(variant)
            elif not runs_module(engine):
                reason = f"on the {device.upper()} it computes in {', '.join(_FILES[engine, device])}"
                wanted.skipped.append(Skipped(engine=engine, precision=precision, reason=reason))
    if all(each.baseline for each in wanted.variants):
        raise CompileError(
            f"compile.engines {config.engines} with compile.precisions {config.precisions} have nothing that runs here "
            "and could be published: name others, such as openvino and fp32, or compile where the engines run"
        )
    return wanted


def _refuse_keys_of_tensorrt(config: CompileConfig) -> None:
    """What no engine for this machine does; where engines are named, the recipe itself was refused."""
    for key, is_set in (
        ("precisions name fp8", "fp8" in config.precisions),
        ("sparsity is 2:4", config.sparsity != "none"),
        (f"workspace_mb is {config.workspace_mb}", config.workspace_mb is not None),
    ):
        if is_set:
            raise CompileError(
                f"compile.{key}, which is of {' and '.join(PLAN_ENGINES)}, and none of them runs here: leave it out, "
                f"or name {BUILT_AHEAD} in compile.engines with compile.targets"
            )


def _automatic(has_gpu: bool) -> list[tuple[EngineName, Device]]:
    places: list[tuple[EngineName, Device]] = [("openvino", "cpu"), ("onnxruntime", "cpu"), ("torch", "cpu")]
    if has_gpu:
        installed = installed_engines()
        places += [(engine, "gpu") for engine in PLAN_ENGINES if engine in installed][:1]
        places += [("onnxruntime", "gpu")] if _has_cuda() else []
        places += [("torch", "gpu")]
    return places


def _named(engines: list[EngineName], ahead: bool, has_gpu: bool) -> list[tuple[EngineName, Device]]:
    places: list[tuple[EngineName, Device]] = []
    for engine in engines:
        try:
            require_installed(engine)
        except EngineError as error:
            raise EngineError(f"compile.engines names {engine}: {error}") from error
        here = [device for name, device in _FILES if name == engine and _is_here(engine, device, has_gpu)]
        if not here and not (engine == BUILT_AHEAD and ahead):
            ahead_of_time = "name the GPUs to build for in compile.targets"
            hint = ahead_of_time if engine == BUILT_AHEAD else "reserve one with compile.gpus=1, or leave it out"
            raise CompileError(f"compile.engines names {engine}, and this machine has no GPU: {hint}")
        places += [(engine, device) for device in here]
    return places


def _is_here(engine: EngineName, device: Device, has_gpu: bool) -> bool:
    return device == "cpu" or (has_gpu and (engine != "onnxruntime" or _has_cuda()))


def _has_cuda() -> bool:
    """Whether ONNX Runtime was built for CUDA."""
    import onnxruntime  # only a machine with a GPU asks

    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()
