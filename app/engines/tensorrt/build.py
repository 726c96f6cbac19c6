"""Builds plans from ONNX files: for the GPU in this machine, or with TensorRT for RTX ahead of time for named GPUs."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from app.checksums import sha256_of, sha256_of_file
from app.engines.architecture import compute_capability
from app.engines.base import ShapeProfile
from app.engines.tensorrt.library import Flavour, Library, load_library
from app.engines.tensorrt.manifest import Bounds, BuildSettings, Machine, PlanKey, PlanManifest, write_plan
from app.engines.tensorrt.network import parse_network
from app.engines.tensorrt.profiles import optimization_profiles
from app.errors import CompileError
from app.tensors import Tensor


def build_plan(
    flavour: Flavour, onnx: Path, plan: Path, settings: BuildSettings, targets: tuple[str, ...] = ()
) -> PlanManifest:
    """Build the plan of an ONNX file, and write it and its manifest.

    Args:
        targets: compute capabilities such as SM89, for TensorRT for RTX only; empty for this machine's GPU.

    Raises:
        EngineError: the library cannot be loaded.
        CompileError: the library does not know a target, the file does not parse, engines do not take the type of an
            input or output, or the build fails; the node, tensor or target is named.
    """
    library = load_library(flavour)
    machine = Machine(engine=flavour, engine_version=library.version, architectures=_architectures(library, targets))
    with library.errors() as errors:
        builder = _builder(library, errors)
        network = parse_network(library, builder, onnx)
        profiles = _profiles(network.inputs, settings.profile)
        config = builder_config(library, builder, settings, profiles)
        _set_targets(library, config, machine.architectures)
        serialized = builder.build_serialized_network(network.definition, config)
        if serialized is None:
            raise CompileError(
                f"{flavour} cannot build {str(onnx)!r} for {', '.join(machine.architectures)}: {'; '.join(errors)}"
            ).of("tensorrt.build_fails")

    content = bytes(serialized)
    manifest = PlanManifest(
        key=PlanKey(machine=machine, onnx_sha256=sha256_of_file(onnx), settings=settings),
        plan_sha256=sha256_of(content),
        inputs=network.inputs,
        outputs=network.outputs,
        profiles=profiles,
    )
    write_plan(plan, content, manifest)
    return manifest


def _architectures(library: Library, targets: tuple[str, ...]) -> tuple[str, ...]:
    """Return the compute capabilities to build for: the targets, else this machine's GPU."""
    if targets and not library.targets:
        raise CompileError(f"{library.flavour} builds for the GPU present alone: leave out {', '.join(targets)}").of(
            "target.unsupported"
        )
    present = compute_capability()
    architectures = targets or ((present,) if present else ())
    if not architectures:
        remedy = f"name one or more of {', '.join(library.targets)}" if library.targets else "build where it will run"
        raise CompileError(f"{library.flavour} has no target, and this machine has no GPU: {remedy}").of(
            "target.missing"
        )
    if library.targets and (unknown := [name for name in architectures if name not in library.targets]):
        raise CompileError(
            f"{library.flavour} {library.version} does not build for {unknown[0]}, only for "
            f"{', '.join(library.targets)}: build with tensorrt on a machine with that GPU"
        ).of("target.unknown")
    return architectures


def _builder(library: Library, errors: Collection[str]) -> Any:
    try:
        return library.trt.Builder(library.logger)
    except TypeError as error:  # the bindings' error for a null pointer
        raise CompileError(f"{library.flavour} cannot start to build: {'; '.join(errors)}").of(
            "tensorrt.no_builder"
        ) from error


def _profiles(inputs: tuple[Tensor, ...], profile: ShapeProfile) -> tuple[Bounds, ...]:
    """Return the bounds of each input in each optimization profile."""
    varies = any(-1 in tensor.shape[1:] for tensor in inputs)
    if varies and not profile.lengths:
        raise CompileError("the model has a length that varies: give the lengths that the plan is built for").of(
            "lengths.missing"
        )
    if profile.lengths and not varies:
        raise CompileError(f"the model has no length that varies: leave out the lengths {list(profile.lengths)}").of(
            "lengths.unexpected"
        )
    return tuple(
        {tensor.name: ranges.bounds(tensor.shape) for tensor in inputs} for ranges in optimization_profiles(profile)
    )


def builder_config(library: Library, builder: Any, settings: BuildSettings, profiles: tuple[Bounds, ...]) -> Any:
    """Return the library's build configuration, without targets. Raises CompileError if it refuses a profile."""
    trt = library.trt
    config = builder.create_builder_config()
    # TF32 is on by default, with a mantissa of only 10 bits.
    config.clear_flag(trt.BuilderFlag.TF32)
    if settings.sparse_weights:
        config.set_flag(trt.BuilderFlag.SPARSE_WEIGHTS)
    if settings.workspace_mb is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, settings.workspace_mb * 2**20)
    for bounds in profiles:
        profile = builder.create_optimization_profile()
        for name, shapes in bounds.items():
            profile.set_shape(name, *shapes)
        if config.add_optimization_profile(profile) < 0:
            raise CompileError(f"{library.flavour} refuses the profile {bounds}").of("tensorrt.profile_refused")
    return config


def _set_targets(library: Library, config: Any, architectures: tuple[str, ...]) -> None:
    """Name every target, even this machine's GPU. Without targets the library checks nothing against a GPU."""
    if not library.targets:
        return
    config.num_compute_capabilities = len(architectures)
    for index, architecture in enumerate(architectures):
        if not config.set_compute_capability(library.trt.ComputeCapability.__members__[architecture], index):
            raise CompileError(f"{library.flavour} {library.version} refuses the target {architecture}").of(
                "tensorrt.target_refused"
            )
