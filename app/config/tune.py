"""The recipe's ``tune``: the search space, the sampler, the scheduler, and when the search ends."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from app.config.metrics import MEASURED_AT_END, MODES, Mode, TrialMetric
from app.config.notify import is_reference
from app.config.section import IMPORT_STRING, Section, Seed, as_list
from app.errors import RecipeError

Sampler = Literal["tpe", "random", "cmaes", "gp", "nsga2", "grid", "qmc"]
Scheduler = Literal["asha", "hyperband", "median", "pbt", "none"]

_MIN_RANDOM_TRIALS = 4
"""A sampler learns next to nothing from fewer trials."""


@dataclass(frozen=True)
class Objective:
    """A metric of a trial, and whether it is minimized or maximized."""

    metric: str
    mode: Mode

    @property
    def worst(self) -> float:
        """The value that is worse than any number."""
        return math.inf if self.mode == "min" else -math.inf

    @property
    def is_measured_at_end(self) -> bool:
        """Whether it is measured once, after the last epoch."""
        return self.metric in MEASURED_AT_END


def _check_storage(given: str) -> str:
    if is_reference(given):
        return given
    if "://" not in given:
        raise ValueError("expected a URL of SQLAlchemy such as sqlite:////data/studies.db, or env:NAME or file:/PATH")
    return given


Objectives = Annotated[
    list[TrialMetric],
    Field(min_length=1),
    BeforeValidator(as_list, json_schema_input_type=TrialMetric | list[TrialMetric]),
]
Modes = Annotated[list[Mode], BeforeValidator(as_list, json_schema_input_type=Mode | list[Mode])]


class StopConfig(Section):
    """When the search ends before its last trial. Each limit alone is enough."""

    time_s: Annotated[float, Field(gt=0.0)] | None = Field(
        default=None, description="seconds of searching; the time between a stop and tune.resume does not count"
    )
    epochs: PositiveInt | None = Field(default=None, description="number of epochs that all trials train")
    patience: PositiveInt | None = Field(
        default=None, description="number of trials that ended or were paused without a better value"
    )
    min_delta: Annotated[float, Field(ge=0.0)] = Field(
        default=0.0, description="minimum change that counts as better, for patience"
    )


class TuneConfig(Section):
    """A search for the best values of some of the recipe's keys."""

    space: Annotated[str, Field(pattern=rf"^{IMPORT_STRING}$")] = Field(
        description="import string of space(trial), in Optuna's style, or of a dictionary of Ray Tune's domains; "
        "the names in it are keys of the recipe"
    )
    metric: Objectives = Field(
        default=["val_accuracy"],
        description="objective, at the epoch whose weights training keeps: val_loss, val_NAME of the task's metrics, "
        "train_loss, samples_per_s, latency_ms or parameters; several metrics: their Pareto front",
    )
    mode: Modes = Field(default=[], description="max or min, one for each metric; default: as built-in metrics need")
    trials: PositiveInt = Field(default=32, description="maximum number of trials")
    epochs: PositiveInt | None = Field(default=None, description="maximum epochs of a trial; default: train.epochs")
    max_steps: PositiveInt | None = Field(
        default=None,
        description="maximum optimizer steps of a trial, which may be less than an epoch; default: train.max_steps",
    )
    plans: PositiveInt | None = Field(
        default=None, description="also draw train.plan, from this many of the planner's fastest plans"
    )
    sampler: Sampler = Field(default="tpe", description="algorithm that proposes values, learning from earlier trials")
    random_trials: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="number of random trials before tpe, cmaes or gp begin to learn, and size of nsga2's "
        "generations; default: a third of trials, at least four",
    )
    scheduler: Scheduler = Field(
        default="asha",
        description="algorithm that ends trials which are behind; they are recorded as pruned, with their values",
    )
    grace_epochs: PositiveInt = Field(default=1, description="number of epochs before the scheduler may end a trial")
    reduction_factor: Annotated[int, Field(ge=2)] = Field(
        default=4, description="for asha and hyperband: one of so many trials continues at each rung"
    )
    stop: StopConfig = StopConfig()
    retries: Annotated[int, Field(ge=0)] = Field(default=1, description="how often a failed trial is run again")
    workers: PositiveInt | None = Field(
        default=None,
        description="number of processes of a trial; default: as few as its plan needs, for more concurrent trials",
    )
    concurrent: PositiveInt | None = Field(
        default=None,
        description="maximum number of concurrent trials; default: as many as the cluster has or can get room for",
    )
    seed: Seed = Field(default=0, description="seed of the sampler; all trials train with train.seed")
    storage: Annotated[str, BeforeValidator(_check_storage)] | None = Field(
        default=None,
        description="SQLAlchemy URL of the study's database, or env:NAME or file:/PATH that contain one; "
        "default: a SQLite file under studies/ in storage, also on an object store",
    )
    warm_start: list[str] = Field(default=[], description="ids of earlier tune runs from whose trials this one learns")
    resume: bool = Field(
        default=False, description="resume the newest unfinished tune run of this recipe, or start one"
    )

    @property
    def startup_trials(self) -> int:
        """The number of trials before the sampler begins to learn."""
        return max(_MIN_RANDOM_TRIALS, self.trials // 3) if self.random_trials is None else self.random_trials

    @property
    def objectives(self) -> list[Objective]:
        """The metrics with their modes."""
        modes: list[Mode] = self.mode or [MODES.get(metric, "min") for metric in self.metric]
        return [Objective(metric, mode) for metric, mode in zip(self.metric, modes, strict=True)]

    @model_validator(mode="after")
    def _modes_fit_metrics(self) -> Self:
        if len(set(self.metric)) != len(self.metric):
            raise ValueError(f"metric {self.metric} names one twice: leave one out")
        if self.mode and len(self.mode) != len(self.metric):
            raise ValueError(f"mode has {len(self.mode)} entries and metric {len(self.metric)}: give one for each")
        if not self.mode and (unknown := [metric for metric in self.metric if metric not in MODES]):
            raise RecipeError(f"mode is missing: say whether {unknown[0]} is better at its max or min").of(
                "mode.missing"
            )
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        several = len(self.metric) > 1
        if several and self.scheduler != "none":
            raise RecipeError(
                f"scheduler {self.scheduler} compares trials by one value, and metric names {len(self.metric)}: "
                "set scheduler to none"
            ).of("scheduler.one_value")
        if several and self.sampler in ("cmaes", "gp"):
            raise ValueError(f"sampler {self.sampler} is for one metric: set it to tpe or nsga2")
        if self.sampler in ("cmaes", "gp", "nsga2") and self.scheduler in ("asha", "hyperband", "median"):
            raise RecipeError(
                f"sampler {self.sampler} learns only from complete trials, of which scheduler {self.scheduler} "
                "leaves few: set scheduler to none or pbt, or sampler to tpe"
            ).of("sampler.scheduler")
        if self.scheduler == "pbt" and 1 in (self.trials, self.concurrent):
            raise ValueError(
                "scheduler pbt compares trials that run at the same time: set trials and concurrent above 1"
            )
        if several and self.stop.patience:
            raise ValueError("stop.patience needs a single best value, which several metrics do not have: leave it out")
        if self.scheduler != "none" and (late := MEASURED_AT_END & set(self.metric)):
            raise ValueError(
                f"metric {late.pop()} is measured after the last epoch, and scheduler {self.scheduler} compares "
                "epochs: set scheduler to none"
            )
        return self
