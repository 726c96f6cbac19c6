"""The manifest of a version: what it is, where it came from, and how it is served."""

from datetime import datetime
from typing import Literal, Self

from pydantic import BaseModel, NonNegativeInt, PositiveInt, model_validator

from app.tensors import TensorSpec

MODEL_FILE, PLAN_FILE = "model.onnx", "model.plan"
Dtype = Literal[
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64",
]  # fmt: skip


class EngineKey(BaseModel):
    """What a compiled model was made for."""

    onnx_sha256: str
    precision: str
    engine: str
    engine_version: str
    architecture: str
    """Of a CPU as ``platform.machine`` names it; of a GPU its compute capability, such as ``sm_90``."""

    @property
    def on_gpu(self) -> bool:
        """Whether the model runs on a GPU."""
        return self.engine.startswith("tensorrt") or self.architecture.startswith("sm")


class Lineage(BaseModel):
    """Where a version came from."""

    train_run: str
    compile_run: str
    recipe: str
    data_fingerprint: str
    code: str


class Tensor(BaseModel):
    """A tensor that a model takes or gives. A size of -1 varies; the first is the batch."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, spec: TensorSpec) -> Self:
        """The tensor that an engine describes."""
        return cls.model_validate({"name": spec.name, "dtype": spec.dtype.name, "shape": spec.shape})

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.shape)}"


class ServingDefaults(BaseModel):
    """How a version is best served, unless somebody knows better."""

    max_batch_size: PositiveInt
    preferred_batch_sizes: tuple[PositiveInt, ...] = ()
    timeout_us: NonNegativeInt
    """Microseconds that the first request of a batch waits for more."""

    replicas: PositiveInt
    threads: PositiveInt
    """Of one replica's engine."""

    @model_validator(mode="after")
    def _preferred_sizes_can_be_reached(self) -> Self:
        if max(self.preferred_batch_sizes, default=0) > self.max_batch_size:
            raise ValueError(
                f"preferred_batch_sizes are {list(self.preferred_batch_sizes)}: expected {self.max_batch_size}, which "
                "is max_batch_size, at most"
            )
        return self


class ModelCard(BaseModel):
    """What a publisher knows of a model: what it is, where it came from, and how it measured up."""

    task: str
    engine_key: EngineKey
    lineage: Lineage
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    serving: ServingDefaults
    accuracy: float
    max_difference: float


class Manifest(ModelCard):
    """A published version, with the sha256 of each of its files."""

    name: str
    version: int
    created: datetime
    size_bytes: int
    """Of all its files."""

    files: dict[str, str]
