"""What a plan was built from and for, written beside it: a plan says nothing before a GPU has loaded it."""

import platform
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from app.checksums import read_verified
from app.config import ComputePrecision
from app.engines.base import ShapeProfile, Signature
from app.engines.tensorrt.profiles import Shape
from app.errors import CompileError, EngineError, StorageError
from app.storage import to_path, write_atomically
from app.tensors import Tensor

Bounds = dict[str, tuple[Shape, Shape, Shape]]
"""The smallest, best and largest shape of each input in one optimisation profile."""


class FrozenModel(BaseModel):
    """What a manifest holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Machine(FrozenModel):
    """What a plan depends on of the place where it runs; a plan may be for several ``architectures``."""

    engine: str
    engine_version: str
    architectures: tuple[str, ...]
    system: str = f"{sys.platform}-{platform.machine()}"

    def __str__(self) -> str:
        architectures = " or ".join(self.architectures) or "no GPU"
        return f"{self.engine} {self.engine_version} on {architectures}, {self.system}"

    def runs(self, plan: "Machine") -> bool:
        """Whether this machine, which has one GPU or none, runs a plan that was built for ``plan``."""
        return (
            bool(self.architectures)
            and set(self.architectures) <= set(plan.architectures)
            and (self.engine, self.engine_version, self.system) == (plan.engine, plan.engine_version, plan.system)
        )


class BuildSettings(FrozenModel):
    """What a plan is built to be."""

    precision: ComputePrecision
    """What the ONNX file computes in, whose types hold; named here for those who read the manifest."""
    profile: ShapeProfile
    sparse_weights: bool = False
    """Whether weights of which two in four are zero may run on kernels for such."""
    workspace_mb: int | None = None
    """MiB of GPU memory that a layer may use while it runs; None: all there is."""


class PlanKey(FrozenModel):
    """Everything that a plan's numbers and speed depend on: plans of one key can stand in for each other."""

    machine: Machine
    onnx_sha256: str
    settings: BuildSettings


class PlanManifest(FrozenModel):
    """A plan's key, its checksum, its tensors, and the shapes of its optimisation profiles."""

    key: PlanKey
    plan_sha256: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    profiles: tuple[Bounds, ...]

    @property
    def signature(self) -> Signature:
        """What the engine takes and gives."""
        longest = max(self.key.settings.profile.lengths, default=None)
        return Signature(
            tuple(tensor.spec(longest) for tensor in self.inputs), tuple(tensor.spec() for tensor in self.outputs)
        )


def manifest_path(plan: Path) -> Path:
    """``model.plan.json`` of ``model.plan``."""
    return plan.with_name(f"{plan.name}.json")


def write_plan(path: Path, plan: bytes, manifest: PlanManifest) -> None:
    """Write a plan and its manifest, which is last: a plan without one is refused."""
    write_atomically(to_path(path), plan)
    write_atomically(to_path(manifest_path(path)), manifest.model_dump_json(indent=1).encode())


def read_plan(path: Path) -> tuple[bytes, PlanManifest]:
    """A plan and its manifest.

    Raises:
        EngineError: one of them is missing or damaged.
    """
    beside = manifest_path(path)
    try:
        manifest = PlanManifest.model_validate_json(beside.read_bytes())
        return read_verified(to_path(path), manifest.plan_sha256), manifest
    except FileNotFoundError as error:
        raise EngineError(f"the plan {str(path)!r} has no {beside.name} beside it: build it again") from error
    except (ValidationError, CompileError) as error:  # of sizes that cannot be ShapeProfile raises its own
        raise EngineError(f"{str(beside)!r} is not a plan's manifest ({error}): build the plan again") from error
    except StorageError as error:
        raise EngineError(f"the plan {error}") from error
