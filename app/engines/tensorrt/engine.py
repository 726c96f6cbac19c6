"""The engines that run TensorRT plans on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch

from app.engines.architecture import compute_capability
from app.engines.base import EngineSettings, PooledEngine, library_errors
from app.engines.cache import CacheFile
from app.engines.tensorrt.lane import Lane, LoadedPlan
from app.engines.tensorrt.library import Flavour, Library, load_library
from app.engines.tensorrt.manifest import Machine, PlanManifest, read_plan
from app.errors import EngineError
from app.tensors import Tensors


class TensorRtEngine(PooledEngine[Lane]):
    """A plan, run in ``settings.streams`` lanes. Its precision was decided when it was built."""

    name: ClassVar[Flavour] = "tensorrt"

    def __init__(self, path: Path, settings: EngineSettings) -> None:
        """Load a plan, and capture its graphs.

        Raises:
            EngineError: the plan is damaged, or was built for another library, version, GPU or system (both sides are
                named); the library cannot be loaded, or refuses the plan; or the GPU has too little memory.
        """
        content, manifest = read_plan(path)
        library = load_library(self.name)
        self.version = library.version

        present = compute_capability()
        architectures = (present,) if present else ()
        machine = Machine(engine=self.name, engine_version=self.version, architectures=architectures)
        if not machine.runs(manifest.key.machine):
            raise EngineError(
                f"the plan {str(path)!r} was built for {manifest.key.machine}; this is {machine}: "
                "build it here from its ONNX file"
            ).of("tensorrt.other_machine")
        with library_errors(f"{self.name} cannot load the plan {str(path)!r}"):
            torch.cuda.set_device(0)  # creates the CUDA context that the library uses
            engine = _deserialize(library, content, path)
            configuration = runtime_config(library, engine)
            plan = LoadedPlan(
                manifest,
                lambda: engine.create_execution_context(runtime_config=configuration),
                engine.device_memory_size_v2,
                library.compiles_when_run,
                library.messages,
            )
            with _kernels_kept(library, configuration, _kernel_file(settings, manifest, machine)):
                super().__init__(manifest.signature, (Lane(torch, plan) for _ in range(settings.streams)))

    def _run(self, member: Lane, inputs: Tensors) -> Tensors:
        return member.infer(inputs)


class TensorRtRtxEngine(TensorRtEngine):
    """The engine of TensorRT for RTX, which compiles a plan's kernels at their first use."""

    name: ClassVar[Flavour] = "tensorrt_rtx"


def _deserialize(library: Library, content: bytes, path: Path) -> Any:
    with library.errors() as errors:
        engine = library.trt.Runtime(library.logger).deserialize_cuda_engine(content)
        if engine is None:
            raise EngineError(f"{library.flavour} refuses the plan {str(path)!r}: {'; '.join(errors)}").of(
                "tensorrt.plan_refused"
            )
    return engine


def runtime_config(library: Library, engine: Any) -> Any:
    """Return the configuration of execution contexts. Their scratch memory belongs to the lane.

    A library that compiles kernels at run time also captures graphs. It must wait for the kernels of each shape: by
    default it starts with generic ones, and these would end up in the graph and in the cached file.
    """
    trt = library.trt
    configuration = engine.create_runtime_config()
    configuration.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    if library.compiles_when_run:
        configuration.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        eager = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        configuration.dynamic_shapes_kernel_specialization_strategy = eager
    return configuration


def _kernel_file(settings: EngineSettings, manifest: PlanManifest, machine: Machine) -> CacheFile | None:
    if settings.cache is None:
        return None
    return CacheFile.of(settings.cache, manifest.plan_sha256, machine.model_dump_json(), torch.cuda.get_device_name())


@contextmanager
def _kernels_kept(library: Library, configuration: Any, file: CacheFile | None) -> Iterator[None]:
    """Read compiled kernels from ``file``, and write them back with those that are compiled meanwhile.

    The library refuses kernels of another version, GPU or driver, and then compiles them again.
    """
    if file is None or not library.compiles_when_run:
        yield
        return
    kernels = configuration.create_runtime_cache()
    if (kept := file.read()) is not None:
        kernels.deserialize(kept)
    configuration.set_runtime_cache(kernels)
    yield
    file.write(bytes(kernels.serialize()))
