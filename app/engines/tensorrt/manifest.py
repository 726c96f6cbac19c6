"""The manifest beside a plan: its sources and target. The plan itself tells nothing before a GPU has loaded it."""

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
"""The smallest, best and largest shape of each input in one optimization profile."""


class FrozenModel(BaseModel):
    """Base of the parts of a manifest."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Machine(FrozenModel):
    """The properties of a machine that a plan depends on. A plan may be built for several ``architectures``."""

    engine: str
    engine_version: str
    architectures: tuple[str, ...]
    system: str = f"{sys.platform}-{platform.machine()}"

    def __str__(self) -> str:
        architectures = " or ".join(self.architectures) or "no GPU"
        return f"{self.engine} {self.engine_version} on {architectures}, {self.system}"

    def runs(self, plan: "Machine") -> bool:
        """Return whether this machine, which has one GPU or none, runs a plan that was built for ``plan``."""
        return (
            bool(self.architectures)
            and set(self.architectures) <= set(plan.architectures)
            and (self.engine, self.engine_version, self.system) == (plan.engine, plan.engine_version, plan.system)
        )


class BuildSettings(FrozenModel):
    """Settings of a build."""

    precision: ComputePrecision
    """The precision of the ONNX file, for readers of the manifest. The file's own types decide."""
    profile: ShapeProfile
    sparse_weights: bool = False
    """Whether weights with 2-of-4 sparsity may run on sparse kernels."""
    workspace_mb: int | None = None
    """MiB of GPU memory that a layer may use while it runs; None for no limit."""


class PlanKey(FrozenModel):
    """Everything that a plan's numbers and speed depend on. Plans with the same key are interchangeable."""

    machine: Machine
    onnx_sha256: str
    settings: BuildSettings


class PlanManifest(FrozenModel):
    """A plan's key, its checksum, its tensors, and the shapes of its optimization profiles."""

    key: PlanKey
    plan_sha256: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    profiles: tuple[Bounds, ...]

    @property
    def signature(self) -> Signature:
        """The inputs and outputs of the engine."""
        longest = max(self.key.settings.profile.lengths, default=None)
        return Signature(
            tuple(tensor.spec(longest) for tensor in self.inputs), tuple(tensor.spec() for tensor in self.outputs)
        )


def manifest_path(plan: Path) -> Path:
    """Return the path of a plan's manifest: ``model.plan.json`` for ``model.plan``."""
    return plan.with_name(f"{plan.name}.json")


def write_plan(path: Path, plan: bytes, manifest: PlanManifest) -> None:
    """Write a plan, then its manifest, without which a plan is refused."""
    write_atomically(to_path(path), plan)
    write_atomically(to_path(manifest_path(path)), manifest.model_dump_json(indent=1).encode())


def read_plan(path: Path) -> tuple[bytes, PlanManifest]:
    """Return a plan and its manifest.

    Raises:
        EngineError: one of them is missing or damaged.
    """
    manifest_file = manifest_path(path)
    try:
        manifest = PlanManifest.model_validate_json(manifest_file.read_bytes())
        return read_verified(to_path(path), manifest.plan_sha256), manifest
    except FileNotFoundError as error:
        raise EngineError(f"the plan {str(path)!r} has no {manifest_file.name} beside it: build it again").of(
            "manifest.missing"
        ) from error
    except (ValidationError, CompileError) as error:
        # ``ShapeProfile`` raises CompileError for invalid sizes.
        raise EngineError(f"{str(manifest_file)!r} is not a plan's manifest ({error}): build the plan again").of(
            "manifest.damaged"
        ) from error
    except StorageError as error:
        raise EngineError(f"the plan {error}").of(error.rule, error.key) from error
