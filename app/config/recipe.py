"""The recipe: one task from its data to its endpoint, as a frozen tree of pydantic models."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, field_validator, model_validator

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
_IMPORT_STRING = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
ImportString = Annotated[str, Field(pattern=rf"^{_IMPORT_STRING}$")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]


class Section(BaseModel):
    """A part of the recipe. Unknown keys and wrong types are refused; values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class CleanConfig(Section):
    """What cleaning drops before the split. Texts under several labels are always dropped."""

    drop_empty: bool = True
    deduplicate: bool = True


class ColumnsConfig(Section):
    """The columns of a csv, jsonl or parquet source."""

    input: str = Field(default="text", description="column of the text")
    label: str = Field(default="label", description="column of the class")


class TokenizerConfig(Section):
    """The byte-pair tokenizer that is trained on the training split."""

    vocab_size: PositiveInt = 8000
    max_piece_length: PositiveInt = Field(default=4, description="characters in a token")


class ImageConfig(Section):
    """The shape that images are brought to."""

    size: PositiveInt = Field(default=32, description="height and width in pixels")
    channels: Literal[1, 3] = Field(default=3, description="1: grey, 3: RGB")


class DataConfig(Section):
    """Where examples come from and how they become batches."""

    source: str = Field(
        description="builtin:NAME, or a path or URI of a csv, jsonl or parquet file, "
        "or an image folder with one subfolder a class"
    )
    validation_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    seed: int = Field(default=0, description="seed of the split")
    columns: ColumnsConfig = ColumnsConfig()
    clean: CleanConfig = CleanConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    image: ImageConfig = ImageConfig()
    buckets: Annotated[list[PositiveInt], Field(min_length=1)] = Field(
        default=[32, 64, 128, 256],
        description="lengths in tokens that batches are padded to; longer texts are cut at the last",
    )

    @field_validator("buckets")
    @classmethod
    def _buckets_ascend(cls, buckets: list[int]) -> list[int]:
        if buckets != sorted(set(buckets)):
            raise ValueError(f"lengths must ascend without repeats, got {buckets}")
        return buckets


class ModelConfig(Section):
    """The model: a function that returns a ``torch.nn.Module``, and its arguments."""

    factory: ImportString
    args: dict[str, Any] = {}


class OptimizerConfig(Section):
    """The optimizer and its rates."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: Annotated[float, Field(gt=0.0)] = 3.0e-4
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.01
    momentum: Fraction = Field(default=0.0, description="for sgd")
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.999), strict=False, description="for adamw")


class ScheduleConfig(Section):
    """How the learning rate moves over the optimizer steps of a run."""

    name: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_fraction: Fraction = 0.05


class EarlyStoppingConfig(Section):
    """Stop when the last ``patience`` epochs brought nothing better than the best before them."""

    metric: Literal["val_loss", "val_accuracy"] = "val_loss"
    mode: Literal["min", "max"] = "min"
    patience: PositiveInt = 3
    min_delta: Annotated[float, Field(ge=0.0)] = 0.0

    @model_validator(mode="after")
    def _mode_fits_metric(self) -> Self:
        expected = "min" if self.metric == "val_loss" else "max"
        if self.mode != expected:
            raise ValueError(f"metric {self.metric} is better when {expected}imal: set mode to {expected}")
        return self


class PlanConfig(Section):
    """How training is laid over the workers; ``data`` parallel ranks are all of them."""

    tensor: Literal[1] = 1
    pipeline: Literal[1] = 1
    zero_stage: Literal[0, 1, 2] = 1
    offload: Literal["none"] = "none"
    micro_batch: PositiveInt | None = Field(
        default=None, description="samples a worker computes at once; default: its whole share, 64 at most"
    )
    activation_checkpointing: Literal[False] = False


def _read_plan(given: object) -> object:
    if isinstance(given, str):
        if given != "auto":
            raise ValueError(f"expected auto, or keys such as zero_stage, got {given!r}")
        return PlanConfig()
    return given


Plan = Annotated[PlanConfig, BeforeValidator(_read_plan, json_schema_input_type=Literal["auto"] | PlanConfig)]
"""A plan, or ``auto``: ZeRO 1, the cheapest stage that splits the optimizer."""


class TrainConfig(Section):
    """The training run."""

    epochs: PositiveInt = 3
    global_batch_size: PositiveInt = 64
    precision: Literal["fp32", "bf16"] = "fp32"
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    early_stopping: EarlyStoppingConfig | None = EarlyStoppingConfig()
    gradient_clipping: Annotated[float, Field(ge=0.0)] = Field(
        default=1.0, description="largest global norm of the gradient; 0 leaves it as it is"
    )
    label_smoothing: Fraction = 0.0
    linear_baseline: bool = Field(
        default=False, description="texts: also fit a linear model on the same split, to compare with"
    )
    max_steps: PositiveInt | None = Field(default=None, description="stop after so many optimizer steps")
    seed: int = 0
    workers: PositiveInt = 1
    cpus_per_worker: Annotated[float, Field(gt=0.0)] = 1.0
    device: Literal["cpu", "gpu"] = Field(default="cpu", description="gpu: one GPU a worker")
    max_failures: Annotated[int, Field(ge=0)] = Field(
        default=1, description="lost workers after which Ray restarts from the last checkpoint"
    )
    plan: Plan = PlanConfig()

    @property
    def selection(self) -> EarlyStoppingConfig:
        """The metric by which the best epoch is chosen: early stopping's, or its default."""
        return self.early_stopping or EarlyStoppingConfig()

    @property
    def batch_per_worker(self) -> int:
        """Samples that one worker contributes to an optimizer step."""
        return self.global_batch_size // self.workers

    @property
    def micro_batch(self) -> int:
        """Samples that a worker computes at once: the plan's, or the largest divisor up to 64."""
        share = self.batch_per_worker
        return self.plan.micro_batch or max(n for n in range(1, min(share, 64) + 1) if share % n == 0)

    @property
    def gradient_accumulation(self) -> int:
        """Micro-batches in an optimizer step of one worker."""
        return self.batch_per_worker // self.micro_batch

    @model_validator(mode="after")
    def _global_batch_divides(self) -> Self:
        if self.global_batch_size % self.workers:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not divisible by workers {self.workers}: "
                "choose a multiple"
            )
        if self.batch_per_worker % self.micro_batch:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} over {self.workers} workers is "
                f"{self.batch_per_worker} samples each, not divisible by plan.micro_batch {self.micro_batch}: "
                "global_batch_size = micro_batch x gradient accumulation x workers"
            )
        return self


class GatesConfig(Section):
    """What a compiled variant must hold to be published."""

    max_difference: Annotated[float, Field(gt=0.0)] = Field(
        default=1.0e-4, description="largest absolute difference of a logit from PyTorch's"
    )
    max_accuracy_drop: Fraction = Field(default=0.01, description="from PyTorch's validation accuracy")


class CompileConfig(Section):
    """How the trained model becomes a version in the repository."""

    weights: str | None = Field(
        default=None, description="URI of a weights folder; default: of the newest finished train run"
    )
    precisions: Annotated[list[Literal["fp32"]], Field(min_length=1)] = ["fp32"]
    engines: Literal["auto"] = "auto"
    gates: GatesConfig = GatesConfig()


class BatchingConfig(Section):
    """How requests are joined into one call of the engine."""

    max_batch_size: PositiveInt = Field(default=32, description="requests in a call, and rows in a request, at most")
    timeout_us: Annotated[int, Field(ge=0)] = Field(
        default=2000, description="microseconds that the first request of a batch waits for more"
    )


class ServeConfig(Section):
    """The endpoint."""

    version: PositiveInt | None = Field(
        default=None, description="version to make production; default: production as it is"
    )
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None, description="default: the port that the local cluster chose, else 8000"
    )
    batching: BatchingConfig = BatchingConfig()
    queue_limit: PositiveInt = Field(default=256, description="requests a replica holds at once")
    replicas: PositiveInt = Field(default=1, description="each serves every model; the last deployed recipe decides")
    cpus_per_replica: Annotated[float, Field(ge=0.0)] = Field(
        default=0.0, description="CPUs reserved in Ray; 0 leaves a laptop's cores to the next training"
    )
    threads: PositiveInt = Field(default=1, description="threads of a replica's engine")


class Recipe(Section):
    """One task, its data and its model, from training to the endpoint."""

    name: Name
    task: Annotated[str, Field(pattern=rf"^(text-classification|image-classification|{_IMPORT_STRING})$")]
    storage: str | None = Field(
        default=None, description="URI or absolute path; default: $RAYLOOM_STORAGE, else ~/.rayloom/storage"
    )
    data: DataConfig
    model: ModelConfig
    train: TrainConfig = TrainConfig()
    compile: CompileConfig = CompileConfig()
    serve: ServeConfig = ServeConfig()
