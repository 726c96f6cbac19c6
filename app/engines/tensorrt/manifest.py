"""What a plan was built from and for, written beside it: a plan says nothing before a GPU has loaded it."""

from pathlib import Path

import numpy as np
from pydantic import ValidationError
from upath import UPath

from app.checksums import read_verified
from app.engines.base import ComputePrecision, Signature
from app.engines.tensorrt.machine import Machine, Record
from app.engines.tensorrt.profiles import Buckets, Shape
from app.errors import EngineError, StorageError
from app.storage import write_atomically
from app.tensors import TensorSpec

Bounds = dict[str, tuple[Shape, Shape, Shape]]
"""The smallest, best and largest shape of each input in one profile."""


class BuildSettings(Record):
    """What a plan is built to be."""

    precision: ComputePrecision
    """What the ONNX file computes in, whose types hold; named here for those who read the manifest."""
    buckets: Buckets
    tf32: bool = False
    """Whether float32 may be multiplied with 10 bits of mantissa, which the library does by default."""
    sparse_weights: bool = False
    """Whether weights of which two in four are zero may run on kernels for such."""
    workspace_bytes: int | None = None
    """Scratch memory at most; none: as much as the GPU has."""


class PlanKey(Record):
    """Everything that a plan's numbers and speed depend on: plans of one key can stand in for each other."""

    machine: Machine
    onnx_sha256: str
    settings: BuildSettings


class PlanTensor(Record):
    """An input or output; sizes of -1 vary."""

    name: str
    dtype: str
    shape: Shape

    def spec(self, longest: int | None) -> TensorSpec:
        """As engines describe it."""
        return TensorSpec(self.name, np.dtype(self.dtype), self.shape, longest=longest)


class PlanManifest(Record):
    """A plan's key, its checksum, its tensors, and the shapes of its profiles."""

    key: PlanKey
    plan_sha256: str
    inputs: tuple[PlanTensor, ...]
    outputs: tuple[PlanTensor, ...]
    profiles: tuple[Bounds, ...]

    @property
    def signature(self) -> Signature:
        """What the engine takes and gives."""
        longest = max(self.key.settings.buckets.lengths, default=None)
        return Signature(
            tuple(tensor.spec(longest) for tensor in self.inputs), tuple(tensor.spec(None) for tensor in self.outputs)
        )


def manifest_path(plan: Path) -> Path:
    """``model.plan.json`` of ``model.plan``."""
    return plan.with_name(f"{plan.name}.json")


def write_plan(path: Path, plan: bytes, manifest: PlanManifest) -> None:
    """Write a plan and its manifest, which is last: a plan without one is refused."""
    write_atomically(UPath(path), plan)
    write_atomically(UPath(manifest_path(path)), manifest.model_dump_json(indent=1).encode())


def read_plan(path: Path) -> tuple[bytes, PlanManifest]:
    """A plan and its manifest.

    Raises:
        EngineError: one of them is missing or damaged.
    """
    beside = manifest_path(path)
    try:
        manifest = PlanManifest.model_validate_json(beside.read_bytes())
        return read_verified(UPath(path), manifest.plan_sha256), manifest
    except FileNotFoundError as error:
        raise EngineError(f"the plan {str(path)!r} has no {beside.name} beside it: build it again") from error
    except ValidationError as error:
        raise EngineError(f"{str(beside)!r} is not a plan's manifest ({error}): build the plan again") from error
    except StorageError as error:
        raise EngineError(f"the plan {error}") from error
