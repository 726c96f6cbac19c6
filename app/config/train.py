"""The recipe's ``train``: the training run."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationInfo, field_validator, model_validator

from app.config.augment import AugmentConfig
from app.config.curriculum import CurriculumConfig
from app.config.layout import Layout, lay_out
from app.config.metrics import Mode, TaskMetric
from app.config.placement import LabelSelector, Placement, of_kind
from app.config.plan import AutoPlan, Device, Plan, PlanConfig, Precision
from app.config.plan_rules import ModelTraits, Setting, refusal
from app.config.section import (
    LOCATION,
    CustomResources,
    Fraction,
    NumberOrRange,
    PositiveAmount,
    Section,
    Seed,
    VersionReference,
    is_stored,
)
from app.errors import RecipeError

_MAX_TIMEOUT_S = 365 * 86_400.0
"""Longer ones overflow the timeouts of torch's collectives."""


class OptimizerConfig(Section):
    """The optimizer and its rates."""

    name: Literal["adamw", "sgd"] = Field(default="adamw", description="the algorithm")
    lr: Annotated[float, Field(gt=0.0)] = Field(default=3.0e-4, description="peak learning rate, after the warm-up")
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(
        default=0.01, description="weight decay of parameters with two or more dimensions; biases and norms have none"
    )
    momentum: Fraction = Field(default=0.0, description="for sgd")
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.999), strict=False, description="for adamw")

    @model_validator(mode="after")
    def _has_rates_of_its_own(self, info: ValidationInfo) -> Self:
        for key, name in (("momentum", "sgd"), ("betas", "adamw")):
            given = getattr(self, key)
            if self.name != name and given != type(self).model_fields[key].default and not is_stored(info):
                raise RecipeError(
                    f"{key} {given} is for {name}, and name is {self.name}: leave {key} out, or set name to {name}"
                ).of("keys.contradict")
        return self


class ScheduleConfig(Section):
    """How the learning rate changes over the optimizer steps of a run."""

    name: Literal["cosine", "linear", "constant"] = Field(default="cosine", description="shape after the warm-up")
    warmup_fraction: Fraction = Field(
        default=0.05, description="share of the optimizer steps in which the rate rises to lr"
    )


class EarlyStoppingConfig(Section):
    """Stop when the last ``patience`` epochs did not improve on the best epoch before them."""

    metric: TaskMetric | None = Field(
        default=None,
        description="metric to watch, by which the best epoch is also chosen: val_loss, or val_NAME of the task's; of "
        "equal epochs the one with the lowest val_loss is best; default: the task's first metric",
    )
    mode: Mode | None = Field(
        default=None, description="max if more of the metric is better, as of val_accuracy; default: the metric's own"
    )
    patience: PositiveInt = Field(
        default=3, description="number of epochs without an improvement after which training ends"
    )
    min_delta: Annotated[float, Field(ge=0.0)] = Field(
        default=0.0, description="minimum change that counts as an improvement"
    )


class ProfileConfig(Section):
    """The optimizer steps of a run that are profiled. Each number counts steps."""

    wait: Annotated[int, Field(ge=0)] = Field(default=5, description="steps before profiling begins")
    warmup: Annotated[int, Field(ge=0)] = Field(
        default=1, description="profiled steps that are discarded, because the first ones are slower"
    )
    active: PositiveInt = Field(default=3, description="profiled steps that are kept")


class CheckpointConfig(Section):
    """When checkpoints are written, and how many are kept. One is always written after an epoch."""

    every_steps: PositiveInt | None = Field(default=None, description="also write one after this many optimizer steps")
    num_to_keep: PositiveInt = Field(
        default=2, description="number of newest checkpoints to keep, beside the best epoch's"
    )
    background: bool = Field(default=True, description="write and upload while training continues")


class LoaderConfig(Section):
    """How batches are read."""

    num_workers: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default=0,
        description="number of processes per worker that read ahead; 0: the training process reads; auto: as many as "
        "keep the wait for data under 2 % of a step, within the machine's free cores and memory",
    )
    prefetch_factor: PositiveInt = Field(
        default=2, description="number of micro-batches that each of them reads ahead; auto raises it, too"
    )


class TeacherConfig(Section):
    """Distillation: a published model whose logits the model learns beside the labels (Hinton et al. 2015)."""

    model: VersionReference = Field(
        description="classifier in storage: NAME for its production version, or NAME/VERSION"
    )
    temperature: Annotated[float, Field(gt=0.0)] = Field(
        default=2.0, description="divisor of both models' logits; more shows how the teacher ranks unlikely classes"
    )
    weight: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=0.7, description="share of the loss that compares with the teacher; the labels have the rest"
    )


class PruneConfig(Section):
    """Fine-tuning after pruning: start from trained weights, of which two of four become zero and stay zero."""

    weights: Annotated[str, LOCATION] = Field(
        description="URI of the weights folder of a run with the same data and model"
    )
    pattern: Literal["2-of-4"] = Field(
        default="2-of-4",
        description="the two smallest of four consecutive weights along the input channels become zero",
    )


class TrainConfig(Section):
    """The training run."""

    epochs: PositiveInt = Field(
        default=3, description="maximum number of passes over the training split, or of micro-epochs of a stream"
    )
    global_batch_size: PositiveInt | None = Field(
        default=64,
        description="samples of an optimizer step over all workers, for any number of workers; null with "
        "tokens_per_batch",
    )
    tokens_per_batch: PositiveInt | None = Field(
        default=None,
        description="in place of global_batch_size, for texts: maximum tokens of an optimizer step, with padding; a "
        "batch has samples of similar length, and an epoch has every sample once",
    )
    precision: Precision = Field(
        default="fp32", description="type that the model computes in; fp16 is for GPUs, with a dynamic loss scale"
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    early_stopping: EarlyStoppingConfig | None = Field(
        default=EarlyStoppingConfig(), description="when training ends before its last epoch; null: never"
    )
    gradient_clipping: Annotated[float, Field(ge=0.0)] = Field(
        default=1.0, description="maximum global norm of the gradient; 0: no clipping"
    )
    label_smoothing: Fraction = Field(
        default=0.0, description="share of the target that is spread evenly over all classes"
    )
    class_weights: Literal["balanced"] | dict[str, Annotated[float, Field(gt=0.0)]] | None = Field(
        default=None,
        description="for classes: weight of each label in the training loss, scaled to a mean of 1 over the rows "
        "of the training split; balanced: by how rare the label is; default: all 1",
    )
    temperature: Annotated[float, Field(gt=0.0)] = Field(
        default=0.05, description="for sentence-embedding: by which the loss divides cosines"
    )
    teacher: TeacherConfig | None = Field(default=None, description="model to distil; default: none")
    curriculum: CurriculumConfig | None = Field(
        default=None, description="easy samples before hard ones; default: shuffled"
    )
    augment: AugmentConfig | None = Field(
        default=None, description="random changes of the training samples; default: none"
    )
    prune: PruneConfig | None = Field(default=None, description="trained weights to prune and train on; default: none")
    linear_baseline: bool | None = Field(
        default=None,
        description="also fit a linear model to at most 20,000 rows of the same split; default: for texts, pictures "
        "and tables, unless they are a stream",
    )
    report_samples: NonNegativeInt = Field(
        default=2000,
        description="validation samples that the trained model is run on for the confusion matrix and the worst "
        "samples in report.html; 0: none",
    )
    max_steps: PositiveInt | None = Field(default=None, description="stop after this many optimizer steps")
    seed: Seed = Field(default=0, description="seed of the weights, the order of the samples and dropout")
    workers: NumberOrRange = Field(
        default=1, description="number of processes; or [min, max]: as many as the cluster has room for"
    )
    cpus_per_worker: PositiveAmount = Field(default=1.0, description="CPUs that each worker reserves in Ray")
    device: Device = Field(default="cpu", description="gpu: one GPU per worker")
    resources: CustomResources = Field(
        default={}, description="custom resources that each worker reserves in Ray; they select the kind of node"
    )
    accelerator_type: str | None = Field(
        default=None, description="Ray's name of the GPUs to train on, such as A100-80G; default: any"
    )
    labels: LabelSelector = Field(
        default={}, description="labels of the nodes to train on, as a label selector of Ray: {market: spot}"
    )
    sync_batch_norm: bool = Field(
        default=False, description="compute batch norm statistics over the micro-batches of all workers"
    )
    plan: Plan = Field(
        default=AutoPlan(),
        validate_default=True,
        description="how training is distributed over the workers; auto: the planner chooses once the model is known",
    )
    deepspeed: dict[str, Any] = Field(default={}, description="additional keys of DeepSpeed's own configuration")
    torch_compile: bool = Field(default=False, description="compile the model with torch.compile")
    loader: LoaderConfig = LoaderConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    resume: str | None = Field(
        default=None,
        description="latest: resume the newest unfinished run of this recipe, or start one; or the id of a run",
    )
    max_failures: Annotated[int, Field(ge=0)] = Field(
        default=1, description="number of lost workers after which Ray still restarts from the last checkpoint"
    )
    non_finite: Literal["fail", "rollback"] = Field(
        default="fail",
        description="when a loss or gradient is not finite: stop, or return to the last checkpoint and skip the "
        "batch, at most three times",
    )
    profile: ProfileConfig | None = Field(
        default=None, description="write a trace of a few steps, with a summary of their time, into the run's folder"
    )
    hang_timeout_s: Annotated[float, Field(gt=0.0, le=_MAX_TIMEOUT_S)] = Field(
        default=600.0, description="seconds without progress after which a worker counts as hung, and is named"
    )

    @property
    def workers_range(self) -> tuple[int, int]:
        """Minimum and maximum number of processes."""
        return self.workers if isinstance(self.workers, tuple) else (self.workers, self.workers)

    @property
    def threads(self) -> int:
        """Whole threads of a worker on CPUs."""
        return max(1, int(self.cpus_per_worker))

    @property
    def placement(self) -> Placement:
        """The nodes that may run a worker, and what Ray reserves for it."""
        gpu = {"GPU": 1.0} if self.device == "gpu" else {}
        reserved = {"CPU": self.cpus_per_worker, **gpu, **of_kind(self.accelerator_type), **self.resources}
        return Placement(reserved, self.labels)

    @property
    def preparation(self) -> Placement:
        """The nodes that may prepare a part of the data. The kind of GPU is ignored, because preparation needs none."""
        return Placement({"CPU": 1.0, **self.resources}, self.labels)

    @property
    def worker_counts(self) -> list[int]:
        """Numbers of processes in the range that divide the global batch evenly, ascending."""
        min_workers, max_workers = self.workers_range
        return [workers for workers in range(min_workers, max_workers + 1) if self._can_lay_out(workers)]

    def _can_lay_out(self, workers: int) -> bool:
        try:
            self.layout(workers)
        except RecipeError:
            return False
        return True

    @property
    def batch_size(self) -> int:
        """The size of a global batch: samples, or tokens with ``tokens_per_batch``."""
        size = self.tokens_per_batch or self.global_batch_size
        assert size is not None
        return size

    def layout(self, workers: int) -> Layout:
        """Return the layout on ``workers`` processes. Raise RecipeError if the global batch cannot be divided."""
        return lay_out(self.plan, self.batch_size, workers, in_tokens=self.tokens_per_batch is not None)

    def setting(self, model: ModelTraits | None, inputs: Iterable[str] = ()) -> Setting:
        """Return the setting for the plan's rules. ``inputs`` are the names of the batch's tensors for the model."""
        return Setting(
            self.workers_range,
            self.precision,
            self.device,
            self.optimizer.name,
            model,
            tuple(inputs),
            self.sync_batch_norm,
            self.tokens_per_batch is not None,
        )

    @model_validator(mode="before")
    @classmethod
    def _tokens_replace_samples(cls, given: object) -> object:
        """Drop the default of ``global_batch_size`` where ``tokens_per_batch`` is set."""
        if isinstance(given, dict) and given.get("tokens_per_batch") is not None:
            return {"global_batch_size": None} | given
        return given

    @model_validator(mode="after")
    def _batch_has_one_size(self) -> Self:
        if self.tokens_per_batch is None and self.global_batch_size is None:
            raise RecipeError("global_batch_size is null: set it to a number of samples, or set tokens_per_batch").of(
                "recipe.missing"
            )
        if self.tokens_per_batch is not None and self.global_batch_size is not None:
            raise RecipeError(
                f"global_batch_size {self.global_batch_size} and tokens_per_batch {self.tokens_per_batch} both say how "
                "large a batch is: leave one of them out, or set it to null"
            ).of("keys.contradict")
        return self

    @model_validator(mode="after")
    def _baseline_has_samples(self, info: ValidationInfo) -> Self:
        if self.linear_baseline and not self.report_samples and not is_stored(info):
            raise RecipeError(
                "linear_baseline is true, and report_samples 0 leaves out the verdict that it is for: raise "
                "report_samples, or leave linear_baseline out"
            ).of("keys.contradict")
        return self

    @model_validator(mode="after")
    def _nodes_can_be_chosen(self) -> Self:
        if self.accelerator_type and self.device != "gpu":
            raise RecipeError(
                f"accelerator_type {self.accelerator_type} is a kind of GPU: set device to gpu as well"
            ).of("keys.contradict")
        if self.labels and isinstance(self.workers, tuple):
            raise RecipeError(
                "labels are given, and workers is a range, for which Ray counts nodes without their labels: give a "
                "number of workers, or select the nodes by resources"
            ).of("keys.contradict")
        return self

    @field_validator("plan")
    @classmethod
    def _plan_can_run(cls, plan: PlanConfig, info: ValidationInfo) -> PlanConfig:
        """Check the plan against the keys above it, which report their own errors.

        A stored plan is not checked: it has trained before.
        """
        if is_stored(info):
            return plan
        if not info.data.keys() >= {"precision", "optimizer", "workers", "device", "sync_batch_norm"}:
            return plan
        # Without validation, because the section is not complete yet.
        if reason := refusal(plan, cls.model_construct(None, **info.data).setting(model=None)):
            raise RecipeError(reason).of("plan.cannot_run")
        return plan

    @model_validator(mode="after")
    def _global_batch_divides(self, info: ValidationInfo) -> Self:
        if not is_stored(info) and not self.worker_counts:
            self.layout(self.workers_range[1])  # raises ValueError with the reason
        return self
