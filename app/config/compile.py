"""The recipe's ``compile``: which variants are made, what they must hold, and which one is published."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from app.config.section import CustomResources, Fraction, Section

ComputePrecision = Literal["fp32", "bf16", "fp16", "int8", "fp8"]
EngineName = Literal["openvino", "onnxruntime", "tensorrt", "tensorrt_rtx", "torch"]
CalibrationMethod = Literal["minmax", "percentile", "entropy"]

PLAN_ENGINES: tuple[EngineName, ...] = ("tensorrt", "tensorrt_rtx")
"""They run plans, which are built for a GPU; fp8, sparsity and a limit of workspace are theirs alone."""


class CalibrationConfig(Section):
    """How int8's ranges are found, from samples of the training split."""

    method: Literal["auto"] | CalibrationMethod = Field(
        default="auto", description="auto: each in turn, until one holds the gates"
    )
    samples: Annotated[int, Field(ge=16)] | None = Field(
        default=None, description="of the training split; default: 512, or all of a smaller one"
    )


class GatesConfig(Section):
    """What a variant must hold to be published."""

    max_difference: PositiveFloat = Field(
        default=1.0e-4, description="of fp32: largest absolute difference of a logit from PyTorch's"
    )
    max_accuracy_drop: Fraction = Field(default=0.01, description="from PyTorch's validation accuracy")
    min_cosine: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=0.99, description="mean cosine of a row's logits to PyTorch's"
    )


class ObjectiveConfig(Section):
    """What the published variant and its serving settings are best at, among those that hold the gates."""

    goal: Literal["max_throughput", "min_latency"] = Field(
        default="min_latency",
        description="min_latency: the fastest call with one row; max_throughput: the most rows a second",
    )
    latency_ms: PositiveFloat | None = Field(
        default=None, description="of max_throughput: what a call may take, 95 of 100; default: any time"
    )

    def __str__(self) -> str:
        return self.goal + (f" within {self.latency_ms:g} ms" if self.latency_ms is not None else "")

    @model_validator(mode="after")
    def _limit_has_a_goal(self) -> Self:
        if self.goal == "min_latency" and self.latency_ms is not None:
            raise ValueError("latency_ms limits goal max_throughput: leave it out, or change the goal")
        return self


class CompileConfig(Section):
    """How the trained model becomes a version in the repository."""

    weights: str | None = Field(
        default=None, description="URI of a weights folder; default: of the newest finished train run"
    )
    cpus: Annotated[float, Field(ge=0.0)] = Field(
        default=1.0, description="CPUs reserved in Ray on one node; reserve all of a node's for undisturbed timings"
    )
    gpus: Annotated[int, Field(ge=0, le=1)] = Field(default=0, description="GPUs reserved in Ray; 0: none is used")
    resources: CustomResources = Field(
        default={}, description="custom resources reserved in Ray; choose the kind of node that will serve"
    )
    precisions: list[ComputePrecision] = Field(
        default=["fp32", "bf16", "int8"], min_length=1, description="precisions to make variants in"
    )
    engines: Literal["auto"] | Annotated[list[EngineName], Field(min_length=1)] = Field(
        default="auto",
        description="auto: all that this machine has, and torch to compare with; torch is published where it is named",
    )
    calibration: CalibrationConfig = CalibrationConfig()
    gates: GatesConfig = GatesConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    sparsity: Literal["none", "2:4"] = Field(
        default="none", description="2:4: the two smaller of four weights in a row become zero, for GPUs"
    )
    workspace_mb: PositiveInt | None = Field(
        default=None, description="of GPU memory, in MiB, that a layer of a plan may use while it runs; default: all"
    )
    targets: list[Annotated[str, Field(pattern=r"^SM\d{2,3}$")]] = Field(
        default=[], description="of tensorrt_rtx: compute capabilities to build for ahead of time, such as SM89"
    )
    batch_sizes: list[PositiveInt] = Field(
        default=[1, 4, 16, 32], min_length=1, description="that are measured, and that TensorRT's profiles are made for"
    )

    @property
    def reserved(self) -> dict[str, float]:
        """Resources that Ray reserves on one node for the whole job."""
        return {"CPU": self.cpus, "GPU": float(self.gpus), **self.resources}

    @property
    def chooses_node(self) -> bool:
        """True if compilation may run on another kind of node than the job's driver."""
        return bool(self.gpus or self.resources)

    @field_validator("precisions", "engines", "batch_sizes")
    @classmethod
    def _nothing_twice(cls, given: list[str]) -> list[str]:
        if isinstance(given, list) and len(set(given)) < len(given):
            raise ValueError(f"{given} has something twice")
        return given

    @field_validator("sparsity", mode="before")
    @classmethod
    def _as_it_was_written(cls, given: object) -> object:
        """YAML 1.1 counts in sixties: it reads 2:4 without quotes as 124."""
        return "2:4" if given == 2 * 60 + 4 else given

    @model_validator(mode="after")
    def _keys_for_gpus_have_an_engine(self) -> Self:
        if self.engines == "auto" or not set(PLAN_ENGINES).isdisjoint(self.engines):
            return self
        for asked, is_set in (
            ("precisions name fp8, which", "fp8" in self.precisions),
            (f"sparsity {self.sparsity}", self.sparsity != "none"),
            (f"workspace_mb {self.workspace_mb}", self.workspace_mb is not None),
        ):
            if is_set:
                raise ValueError(f"{asked} is of {' and '.join(PLAN_ENGINES)}: name one in engines")
        return self

    @model_validator(mode="after")
    def _targets_have_an_engine(self) -> Self:
        if self.targets and (self.engines == "auto" or "tensorrt_rtx" not in self.engines):
            raise ValueError(f"targets {self.targets} are of engine tensorrt_rtx: name it in engines")
        return self
