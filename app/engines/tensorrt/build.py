"""From an ONNX file to a plan: for the GPU present, or with TensorRT for RTX ahead of time for GPUs by name."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from app.checksums import sha256_of
from app.engines.tensorrt.library import Flavour, Library, load_library
from app.engines.tensorrt.machine import Machine, architectures_present
from app.engines.tensorrt.manifest import Bounds, BuildSettings, PlanKey, PlanManifest, PlanTensor, write_plan
from app.engines.tensorrt.network import parse_network
from app.engines.tensorrt.onnx_file import sha256_of_onnx
from app.engines.tensorrt.profiles import Buckets
from app.errors import CompileError


def build_plan(
    flavour: Flavour, onnx: Path, plan: Path, settings: BuildSettings, targets: tuple[str, ...] = ()
) -> PlanManifest:
    """Build the plan of an ONNX file, and write it with its manifest beside it.

    Args:
        targets: compute capabilities such as SM89, of TensorRT for RTX alone; none: that of the GPU present.

    Raises:
        EngineError: the library cannot be loaded.
        CompileError: a target is not one of the library's, the file does not parse, an input or output is not one
            that engines take, or the build fails; the node, tensor or target is named.
    """
    library = load_library(flavour)
    machine = Machine(engine=flavour, engine_version=library.version, architectures=_architectures(library, targets))
    with library.errors() as errors:
        builder = _builder(library, errors)
        network = parse_network(library, builder, onnx)
        profiles = _profiles(network.inputs, settings.buckets)
        config = _configuration(library, builder, settings, profiles)
        _set_targets(library, config, machine.architectures)
        serialized = builder.build_serialized_network(network.definition, config)
        if serialized is None:
            raise CompileError(
                f"{flavour} cannot build {str(onnx)!r} for {', '.join(machine.architectures)}: {'; '.join(errors)}"
            )
    content = bytes(serialized)
    manifest = PlanManifest(
        key=PlanKey(machine=machine, onnx_sha256=sha256_of_onnx(onnx), settings=settings),
        plan_sha256=sha256_of(content),
        inputs=network.inputs,
        outputs=network.outputs,
        profiles=profiles,
    )
    write_plan(plan, content, manifest)
    return manifest


def _architectures(library: Library, targets: tuple[str, ...]) -> tuple[str, ...]:
    """What a plan is built for: the targets, else the GPU present."""
    if targets and not library.targets:
        raise CompileError(f"{library.flavour} builds for the GPU present alone: leave out {', '.join(targets)}")
    architectures = targets or architectures_present()
    if not architectures:
        remedy = f"name one or more of {', '.join(library.targets)}" if library.targets else "build where it will run"
        raise CompileError(f"{library.flavour} has no target, and this machine has no GPU: {remedy}")
    if library.targets and (unknown := [each for each in architectures if each not in library.targets]):
        raise CompileError(
            f"{library.flavour} {library.version} does not build for {unknown[0]}, only for "
            f"{', '.join(library.targets)}: build with tensorrt on a machine with that GPU"
        )
    return architectures


def _builder(library: Library, errors: Collection[str]) -> Any:
    try:
        return library.trt.Builder(library.logger)
    except TypeError as error:  # what the bindings make of a null pointer
        raise CompileError(f"{library.flavour} cannot start to build: {'; '.join(errors)}") from error


def _profiles(inputs: tuple[PlanTensor, ...], buckets: Buckets) -> tuple[Bounds, ...]:
    """The bounds of each input in each profile."""
    varies = any(-1 in tensor.shape[1:] for tensor in inputs)
    if varies and not buckets.lengths:
        raise CompileError("the model has a length that varies: give the lengths that the plan is built for")
    if buckets.lengths and not varies:
        raise CompileError(f"the model has no length that varies: leave out the lengths {list(buckets.lengths)}")
    return tuple({tensor.name: profile.bounds(tensor.shape) for tensor in inputs} for profile in buckets.profiles)


def _configuration(library: Library, builder: Any, settings: BuildSettings, profiles: tuple[Bounds, ...]) -> Any:
    trt = library.trt
    config = builder.create_builder_config()
    if not settings.tf32:
        config.clear_flag(trt.BuilderFlag.TF32)  # it is set at first
    if settings.sparse_weights:
        config.set_flag(trt.BuilderFlag.SPARSE_WEIGHTS)
    if settings.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, settings.workspace_bytes)
    for bounds in profiles:
        profile = builder.create_optimization_profile()
        for name, shapes in bounds.items():
            profile.set_shape(name, *shapes)
        if config.add_optimization_profile(profile) < 0:
            raise CompileError(f"{library.flavour} refuses the profile {bounds}")
    return config


def _set_targets(library: Library, config: Any, architectures: tuple[str, ...]) -> None:
    """Name every GPU, the one present too: with none named nothing is checked against a GPU."""
    if not library.targets:
        return
    config.num_compute_capabilities = len(architectures)
    for index, each in enumerate(architectures):
        if not config.set_compute_capability(library.trt.ComputeCapability.__members__[each], index):
            raise CompileError(f"{library.flavour} {library.version} refuses the target {each}")
