"""The recipe's ``compile``: the variants, the gates that they must pass, and the choice of the published one."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, field_validator, model_validator

from app.config.placement import Placement
from app.config.section import LOCATION, Amount, CustomResources, Fraction, Section, as_list

ComputePrecision = Literal["fp32", "bf16", "fp16", "int8", "int4", "fp8"]
EngineName = Literal["openvino", "onnxruntime", "tensorrt", "tensorrt_rtx", "torch", "openvino_genai", "vllm"]
CalibrationMethod = Literal["minmax", "percentile", "entropy"]
Engines = Annotated[
    Literal["auto"] | Annotated[list[EngineName], Field(min_length=1)],
    BeforeValidator(lambda given: given if given == "auto" else as_list(given)),
]

PLAN_ENGINES: tuple[EngineName, ...] = ("tensorrt", "tensorrt_rtx")
"""Engines that run TensorRT plans, which are built for a GPU. Only they support fp8, sparsity and ``workspace_mb``."""

MAX_SHARD_MB = 1536
"""A larger ONNX file would come near to protobuf's 2 GiB."""

GENERATION_ENGINES: tuple[EngineName, ...] = ("openvino_genai", "vllm")
"""Engines that generate tokens. Only they run language models. The first one is the default."""


class CalibrationConfig(Section):
    """How the ranges of int8 are found from samples of the training split."""

    method: Literal["auto"] | CalibrationMethod = Field(
        default="auto", description="auto: each in turn, until one passes the gates"
    )
    samples: Annotated[int, Field(ge=16)] | None = Field(
        default=None, description="number of samples from the training split; default: 512, or all of a smaller split"
    )


class Int8FinetuneConfig(Section):
    """Training with the rounding of int8, on the training split, towards the logits of the float model."""

    epochs: PositiveInt = Field(default=1, description="passes over the training split")
    lr: PositiveFloat = Field(default=1.0e-5, description="learning rate of AdamW")
    batch_size: Annotated[int, Field(ge=2)] = Field(default=32, description="samples in a step")


class Int8Config(Section):
    """How int8 is made, beside its calibration."""

    finetune: Int8FinetuneConfig | None = Field(
        default=None,
        description="train with int8's rounding where no calibration passes the gates with every layer in int8; "
        "default: leave layers in float at once",
    )


class GatesConfig(Section):
    """The limits that a variant must keep to be published."""

    max_difference: PositiveFloat = Field(
        default=1.0e-4,
        description="for fp32: maximum difference of a number from PyTorch's, as a share of its column's magnitude",
    )
    max_accuracy_drop: Fraction = Field(
        default=0.01,
        description="maximum drop from PyTorch's validation accuracy, or that of the task's own metric; of an error, "
        "maximum rise as a share of it",
    )
    min_cosine: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=0.99,
        description="minimum mean cosine similarity of a row's logits to PyTorch's; the sine of this angle limits the "
        "relative error of every output that no accuracy judges",
    )
    max_perplexity_rise: Fraction = Field(
        default=0.01,
        description="for language models: maximum rise of perplexity, as a share of fp32's; the upper end of its 95 % "
        "interval over documents counts",
    )
    min_score: float | None = Field(
        default=None,
        description="minimum score of the version, or maximum if the score is an error; on the test split if there is "
        "one; default: none",
    )
    above_baseline: bool = Field(
        default=False,
        description="publish only a version that is better than the constant and the linear baseline by more than its "
        "95 % interval; false: other versions are published with a warning",
    )


class ObjectiveConfig(Section):
    """How the published variant and its serving settings are chosen among those that pass the gates."""

    goal: Literal["max_throughput", "min_latency"] = Field(
        default="min_latency",
        description="min_latency: the fastest call with one row; max_throughput: the most rows per second",
    )
    latency_ms: PositiveFloat | None = Field(
        default=None, description="for max_throughput: limit of the 95th percentile of a call's time; default: none"
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

    weights: Annotated[str | None, LOCATION] = Field(
        default=None, description="URI of a weights folder; default: that of the newest finished train run"
    )
    cpus: Amount = Field(
        default=1.0, description="CPUs reserved in Ray on one node; reserve all of a node's for undisturbed timings"
    )
    gpus: Annotated[int, Field(ge=0, le=1)] = Field(default=0, description="GPUs reserved in Ray; 0: no GPU is used")
    resources: CustomResources = Field(
        default={}, description="custom resources reserved in Ray; choose the kind of node that will serve"
    )
    precisions: Annotated[list[ComputePrecision], Field(min_length=1), BeforeValidator(as_list)] = Field(
        default=["fp32", "bf16", "int8"],
        description="precisions to make variants in; language models have fp32, int8 and int4, and for vllm fp32 and "
        "bf16",
    )
    engines: Engines = Field(
        default="auto",
        description="auto: all engines of this machine, and torch as a baseline; torch is published only if named; "
        "a language model has one engine: openvino_genai, which is auto, or vllm",
    )
    calibration: CalibrationConfig = CalibrationConfig()
    int8: Int8Config = Int8Config()
    gates: GatesConfig = GatesConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    sparsity: Literal["none", "2-of-4"] = Field(
        default="none", description="2-of-4: the two smallest of four consecutive weights become zero, for GPUs"
    )
    speculation: Literal["none", "prompt_lookup"] = Field(
        default="none",
        description="for language models; prompt_lookup: measure each precision also with tokens guessed from repeated "
        "text, which gives the same answers, and publish the fastest",
    )
    workspace_mb: PositiveInt | None = Field(
        default=None,
        description="maximum GPU memory in MiB that a layer of a TensorRT plan may use while it runs; default: all",
    )
    shard_mb: Annotated[int, Field(ge=1, le=MAX_SHARD_MB)] = Field(
        default=MAX_SHARD_MB,
        description="MiB of weights that one file holds; an ONNX file with more has them in files beside it",
    )
    targets: list[Annotated[str, Field(pattern=r"^SM\d{2,3}$")]] = Field(
        default=[], description="for tensorrt_rtx: compute capabilities to build plans for ahead of time, such as SM89"
    )
    batch_sizes: list[PositiveInt] = Field(
        default=[1, 4, 16, 32],
        min_length=1,
        description="batch sizes that are measured, and for which TensorRT's profiles are made",
    )

    @property
    def reserved(self) -> dict[str, float]:
        """Resources that Ray reserves on one node for the whole job."""
        return {"CPU": self.cpus, "GPU": float(self.gpus), **self.resources}

    @property
    def placement(self) -> Placement:
        """The nodes that may run the job, and what Ray reserves for it."""
        return Placement(self.reserved)

    @property
    def chooses_node(self) -> bool:
        """Whether compilation may run on another kind of node than the job's driver."""
        return bool(self.gpus or self.resources)

    @field_validator("precisions", "engines", "batch_sizes")
    @classmethod
    def _no_duplicates(cls, given: list[str]) -> list[str]:
        if isinstance(given, list) and len(set(given)) < len(given):
            raise ValueError(f"{given} has a value twice")
        return given

    @model_validator(mode="after")
    def _keys_for_gpus_have_an_engine(self) -> Self:
        if self.engines == "auto" or not set(PLAN_ENGINES).isdisjoint(self.engines):
            return self
        for key, is_set in (
            ("precision fp8", "fp8" in self.precisions),
            (f"sparsity {self.sparsity}", self.sparsity != "none"),
            (f"workspace_mb {self.workspace_mb}", self.workspace_mb is not None),
        ):
            if is_set:
                raise ValueError(f"{key} needs {' or '.join(PLAN_ENGINES)}: name one in engines")
        return self

    @model_validator(mode="after")
    def _targets_have_an_engine(self) -> Self:
        if self.targets and (self.engines == "auto" or "tensorrt_rtx" not in self.engines):
            raise ValueError(f"targets {self.targets} need engine tensorrt_rtx: name it in engines")
        return self
