"""The manifest of a version: what it is, where it came from, and how it is served."""

from datetime import datetime
from typing import Literal, Self

from pydantic import BaseModel, NonNegativeInt, PositiveInt, model_validator

from app.artifacts import WEIGHTS_FILE
from app.config import CalibrationMethod, ComputePrecision, EngineName, ServeConfig
from app.engines.architecture import Device
from app.engines.base import ShapeProfile, Signature
from app.engines.registry import runs_module, runs_plans
from app.errors import RecipeError
from app.tensors import Tensor

MODEL_FILE, PLAN_FILE = "model.onnx", "model.plan"


class Quantization(BaseModel):
    """How a model became int8 or fp8."""

    method: CalibrationMethod
    smoothing: float
    """How far outliers of activations were moved into weights, from 0, not at all, to 1."""

    exempt: tuple[str, ...]
    """Nodes that were left in float."""

    weights_only: bool = False
    """Whether the weights of these are in int8 all the same, and only what they are given is in float in the file."""

    def __str__(self) -> str:
        but = " but for weights" if self.weights_only else ""
        return f"{self.method}, smoothing {self.smoothing:g}, {len(self.exempt)} nodes in float{but}"


class EngineKey(BaseModel):
    """What a compiled model was made of, and for."""

    onnx_sha256: str
    """Of the ONNX file; of what PyTorch runs, of the weights."""

    precision: ComputePrecision
    engine: EngineName
    engine_version: str
    device: Device
    architecture: str
    """As ``app.engines.architecture.architecture_of`` says it."""

    profile: ShapeProfile

    @property
    def file(self) -> str:
        """The file of a version that the engine opens."""
        if runs_plans(self.engine):
            return PLAN_FILE
        return WEIGHTS_FILE if runs_module(self.engine) else MODEL_FILE

    def __str__(self) -> str:
        return f"{self.engine} {self.engine_version}, {self.precision}, on {self.device} {self.architecture}"


class Lineage(BaseModel):
    """Where a version came from."""

    train_run: str
    trial: str | None = None
    """The trial of a search whose values the training used; None if it used none."""

    compile_run: str
    recipe: str
    data_fingerprint: str
    code: str


class ServingDefaults(BaseModel):
    """How a version is best served, unless somebody knows better."""

    max_batch_size: PositiveInt
    max_batch_size_by_length: dict[PositiveInt, PositiveInt] = {}
    """The maximum at each length that was measured; empty if inputs have one length, or it was not recorded."""

    preferred_batch_sizes: tuple[PositiveInt, ...] = ()
    timeout_us: NonNegativeInt
    """Microseconds that the first request of a batch waits for more."""

    replicas: PositiveInt
    threads: PositiveInt
    """Of one replica's engine."""

    @model_validator(mode="after")
    def _no_size_is_beyond_the_largest(self) -> Self:
        if max(self.preferred_batch_sizes, default=0) > self.max_batch_size:
            raise ValueError(
                f"preferred_batch_sizes are {list(self.preferred_batch_sizes)}: expected {self.max_batch_size} at "
                "most, which is max_batch_size"
            )
        if max(self.max_batch_size_by_length.values(), default=0) > self.max_batch_size:
            raise ValueError(
                f"max_batch_size_by_length is {self.max_batch_size_by_length}: expected {self.max_batch_size} at "
                "most, which is max_batch_size"
            )
        return self

    def overridden(self, config: ServeConfig) -> "ServingDefaults":
        """What a recipe says, and where it says nothing what is said here; of a range of replicas the most.

        If a recipe sets ``max_batch_size`` or preferred sizes, they apply to rows of every length.
        Other replicas share the cores that these were measured on, unless the recipe says their threads too. Of a model
        that is sharded compile measured neither: it has one replica, and each process the threads that it reserves.
        """
        batching, sharded = config.batching, config.tensor_parallel
        measured = 1 if sharded else self.replicas
        _, replicas = config.replica_range or (measured, measured)
        threads = int(sharded.cpus_per_process) if sharded else self.replicas * self.threads // replicas
        most = batching.max_batch_size or self.max_batch_size
        preferred = batching.preferred_batch_sizes
        if preferred is None:
            preferred = [size for size in self.preferred_batch_sizes if size <= most]
        is_measured = batching.max_batch_size is None and not batching.preferred_batch_sizes
        return ServingDefaults(
            max_batch_size=most,
            max_batch_size_by_length=self.max_batch_size_by_length if is_measured else {},
            preferred_batch_sizes=tuple(preferred),
            timeout_us=self.timeout_us if batching.timeout_us is None else batching.timeout_us,
            replicas=replicas,
            threads=config.threads or max(1, threads),
        )


class ModelCard(BaseModel):
    """What a publisher knows of a model: what it is, where it came from, and how it measured up."""

    task: str
    engine_key: EngineKey
    lineage: Lineage
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    serving: ServingDefaults
    quantization: Quantization | None = None
    """None: it is in float."""

    accuracy: float
    """Accuracy of the published model on the test split; without one, on the validation split that chose it."""

    accuracy_split: Literal["test", "validation"] = "validation"
    """The split on which ``accuracy`` was measured."""

    accuracy_rows: PositiveInt | None = None
    """Rows of that split; None in versions that were published before it was recorded."""

    max_difference: float
    """Of a logit from PyTorch's, the largest on the validation split."""

    cosine: float
    """Of a row's logits to PyTorch's, the mean on the validation split."""

    @property
    def signature(self) -> Signature:
        """What the model takes and gives."""
        return Signature(tuple(each.spec() for each in self.inputs), tuple(each.spec() for each in self.outputs))

    def served(self, config: ServeConfig) -> ServingDefaults:
        """How the model is served: as the recipe says, and where it says nothing as compile measured.

        Raises:
            RecipeError: a batch may have more rows than the plan takes, or fewer than are preferred.
        """
        most = config.batching.max_batch_size or self.serving.max_batch_size
        if max(preferred := config.batching.preferred_batch_sizes or [1]) > most:
            raise RecipeError(
                f"serve.batching.preferred_batch_sizes are {list(preferred)}: expected {most} at most, which is "
                "max_batch_size"
            )
        serving, built = self.serving.overridden(config), max(self.engine_key.profile.batch_sizes)
        if runs_plans(self.engine_key.engine) and serving.max_batch_size > built:
            raise RecipeError(
                f"serve.batching.max_batch_size is {serving.max_batch_size}: the plan was built for {built} rows at "
                "most; give as many, or more in compile.batch_sizes and run jobs.compile"
            )
        return serving


class Manifest(ModelCard):
    """A published version, with the sha256 of each of its files."""

    name: str
    version: int
    created: datetime
    size_bytes: int
    """Of all its files."""

    files: dict[str, str]
