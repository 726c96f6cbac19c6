"""From a recipe and a cluster to the planner's problem and its report."""

from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import torch
import yaml
from torch import Tensor, nn

from app.config import AutoPlan, PlanConfig, Recipe, TrainConfig
from app.config.layout import Layout, lay_out
from app.data.prepared import PreparedData
from app.errors import PlanError
from app.models.factory import blueprint_of
from app.planner.calibration import Calibration, read_calibration
from app.planner.cluster import Cluster
from app.planner.measure import measure
from app.planner.memory import GPU_PROCESS, OPTIMIZER_NUMBERS, ProcessMemory
from app.planner.plan import parallel_plan
from app.planner.profile import ModelProfile
from app.planner.search import Candidate, Findings, Problem, price_plan, search
from app.tasks import find_task, prepare
from app.tasks.features import Feature
from app.training.data.recipe_order import count_steps, order_of
from app.training.planning.machine import measure_machine, measure_plan
from app.training.planning.report import PlanReport, plan_keys, report

_DEGREES: dict[Feature, Literal["tensor", "pipeline"]] = {"tensor parallelism": "tensor", "pipeline": "pipeline"}
"""The keys of a plan that a task may not support."""

CPU_CONTEXT_BYTES = 345e6
"""Resident memory of a process that trains, beside its tensors: Python, torch and DeepSpeed. Measured."""
_COMPILER_BYTES = 75e6
"""Resident memory of sympy and of torch's compiler, which checkpointing and DeepSpeed's pipeline import. Measured."""
_MEASURED_PLANS = 3
"""Plans that a calibration runs."""


_HEAP_FRAGMENTATION = 0.4
"""Growth of glibc's heap in the first ten steps, by the activations of one. Measured: 39 MB with 88 MB of them."""


@dataclass(frozen=True)
class Subject:
    """A recipe's model and the samples that it is trained on."""

    recipe: Recipe
    profile: ModelProfile
    inputs: tuple[str, ...]
    steps: int
    """Optimizer steps of the whole recipe."""
    name: str
    """What measured steps belong to."""
    sample_tokens: int | None = None
    """Tokens of the longest sample, where the recipe's batches are sized in tokens."""


def subject_name(recipe: Recipe, num_parameters: int, data: PreparedData) -> str:
    """Name the model, its samples, the batch, the precision and the optimizer."""
    config = recipe.train
    return (
        f"{recipe.model.factory or recipe.model.pretrained}, {num_parameters} parameters, samples of "
        f"{int(data.train.lengths[data.train.longest])}, batch {config.batch_size}"
        f"{' tokens' if config.tokens_per_batch else ''}, {config.precision}, {config.optimizer.name}"
    )


def subject_of(recipe: Recipe, model: nn.Module, data: PreparedData) -> Subject:
    """Return the model's profile on the recipe's longest samples.

    Raises:
        PlanError: the model cannot be measured.
        TrainingError: there are fewer samples than one batch takes.
    """
    inputs = longest_inputs(data)
    profile = measure(model, inputs, recipe.train.precision)
    steps = count_steps(recipe, order_of(recipe, data))
    name = subject_name(recipe, sum(parameter.numel() for parameter in model.parameters()), data)
    return Subject(recipe, profile, tuple(inputs), steps, name, _sample_tokens(recipe.train, data))


def _sample_tokens(config: TrainConfig, data: PreparedData) -> int | None:
    lengths = data.train.padded_lengths if config.tokens_per_batch is not None else None
    return None if lengths is None else int(lengths.max())


def longest_inputs(data: PreparedData) -> dict[str, Tensor]:
    """Return the inputs of the split's longest sample, since memory must hold it."""
    longest = data.train.batch([data.train.longest])
    return {name: torch.as_tensor(array) for name, array in longest.inputs.items()}


def problem_of(subject: Subject, cluster: Cluster, calibration: Calibration | None = None) -> Problem:
    """Return what is searched: the recipe's model, batch and rules on all of the cluster's devices."""
    config = subject.recipe.train
    is_gpu = cluster.device.kind == "gpu"
    # The given cluster may have other workers than the recipe.
    on_cluster = config.model_copy(update={"workers": cluster.devices, "device": cluster.device.kind})
    supports = find_task(subject.recipe.task).supports
    setting = replace(
        on_cluster.setting(subject.profile.traits, subject.inputs),
        unsupported=tuple(degree for feature, degree in _DEGREES.items() if feature not in supports),
    )
    return Problem(
        profile=subject.profile,
        cluster=calibration.apply(cluster) if calibration else cluster,
        setting=setting,
        global_batch=_samples_per_batch(subject, cluster.devices),
        base=PlanConfig() if isinstance(config.plan, AutoPlan) else config.plan,
        rates=calibration.rates if calibration else None,
        optimizer_numbers=_optimizer_numbers(config),
        process=GPU_PROCESS if is_gpu else _cpu_process(calibration),
    )


def _samples_per_batch(subject: Subject, devices: int) -> int:
    """Return the samples of a batch; for one in tokens, how many of the longest sample the devices share evenly."""
    config, tokens = subject.recipe.train, subject.sample_tokens
    return max(1, config.batch_size // tokens // devices) * devices if tokens else config.batch_size


def layout_in_samples(subject: Subject, workers: int) -> Layout:
    """Return the layout of the recipe's plan. A micro-batch of tokens counts as the longest samples that fit."""
    layout = subject.recipe.train.layout(workers)
    if not subject.sample_tokens:
        return layout
    samples = max(1, layout.micro_batch // subject.sample_tokens)
    return replace(layout, micro_batch=samples, share=samples * layout.gradient_accumulation)


def _in_tokens(findings: Findings, tokens: int) -> Findings:
    """Return findings whose plans have micro-batches in tokens, as the recipe has."""

    def converted(config: PlanConfig) -> PlanConfig:
        return config.model_copy(update={"micro_batch": config.micro_batch and config.micro_batch * tokens})

    candidates = (replace(found, config=converted(found.config)) for found in findings.candidates)
    return replace(findings, candidates=tuple(candidates))


def _cpu_process(calibration: Calibration | None) -> ProcessMemory:
    """Return the memory of a process on CPUs, measured where plans have run. Gloo's groups take next to nothing."""
    context = (calibration and calibration.context_bytes) or CPU_CONTEXT_BYTES
    return ProcessMemory(context, 0.0, _COMPILER_BYTES, _HEAP_FRAGMENTATION)


def _optimizer_numbers(config: TrainConfig) -> int:
    """Return the 32-bit numbers that the optimizer keeps for a parameter."""
    if config.optimizer.name == "sgd":
        return OPTIMIZER_NUMBERS["sgd"] if config.optimizer.momentum else 0
    return OPTIMIZER_NUMBERS[config.optimizer.name]


def calibrate(subject: Subject, cluster: Cluster, data: PreparedData) -> Calibration:
    """Measure this machine, then a few steps of the plans that are best by these rates, and of ZeRO 1. Keep both.

    Raises:
        PlanError: the cluster is not this machine's processors, or a worker failed.
    """
    if cluster.device.kind != "cpu":
        raise PlanError(
            f"calibration measures this machine's processors, and the cluster is {cluster}: leave --calibrate out, "
            f"or give --cluster {subject.recipe.train.workers_range[1]}xcpu"
        ).of("calibration.other_machine")
    if subject.sample_tokens:
        raise PlanError(
            "calibration runs batches of one size: set train.global_batch_size, or leave --calibrate out"
        ).of("calibration.no_batch_size", "train.global_batch_size")
    config = subject.recipe.train
    known = read_calibration(cluster, config.precision)
    found = measure_machine(cluster.devices, config.precision, cluster.device.threads)
    # Plans that ran before stay, because the file is of the same machine.
    calibration = found.with_plans(known.plans if known else [])
    # The rates are kept even if a plan fails to run.
    calibration.save()
    candidates = _candidates_to_run(problem_of(subject, cluster, calibration))
    runs = [measure_plan(subject.recipe, data, candidate, subject.name) for candidate in candidates]
    calibration = calibration.with_plans(runs)
    calibration.save()
    return calibration


def _candidates_to_run(problem: Problem) -> list[Candidate]:
    """Return the best plans, and ZeRO 1, which ``auto`` takes otherwise."""
    default = PlanConfig()
    layout = lay_out(default, problem.global_batch, problem.cluster.devices)
    explicit = default.model_copy(update={"micro_batch": layout.micro_batch})
    usual = price_plan(problem, explicit, parallel_plan(explicit, layout))
    best = list(search(problem).candidates[:_MEASURED_PLANS])
    known = [candidate.config for candidate in best]
    # An explicit micro-batch has to divide a rank's share, which the default's need not.
    return [*best, usual] if usual and explicit not in known and layout.share % layout.micro_batch == 0 else best


def find_plans(subject: Subject, cluster: Cluster) -> tuple[Problem, Findings]:
    """Return the plans that fit, fastest first. Where one has run on this machine, the measured time counts."""
    calibration = read_calibration(cluster, subject.profile.precision) if cluster.device.kind == "cpu" else None
    problem = problem_of(subject, cluster, calibration)
    findings = search(problem)
    if subject.sample_tokens:
        return problem, _in_tokens(findings, subject.sample_tokens)
    return problem, with_measurements(findings, calibration, subject.name) if calibration else findings


def fastest_plans(recipe: Recipe, data: PreparedData, cluster: Cluster, count: int) -> list[str]:
    """Return the fastest plans that compute the same as the default, each as a recipe writes ``train.plan``.

    Raises:
        PlanError: the model cannot be measured, or no plan fits.
    """
    subject = subject_of(recipe, blueprint_of(recipe.model, data.facts).model, data)
    _, findings = find_plans(subject, cluster)
    if not findings.exact:
        raise PlanError(f"no plan fits {cluster}: 'rayloom plan' says why").of("plan.none_fits", "tune.plans")
    plans = [candidate.config.model_dump(mode="json", exclude_defaults=True) for candidate in findings.exact[:count]]
    # YAML would break a long plan into several lines by default.
    return [yaml.safe_dump(plan, default_flow_style=True, width=1000).strip() for plan in plans]


def with_measurements(findings: Findings, calibration: Calibration, subject: str) -> Findings:
    """Return the findings with measured times. Other plans are scaled by how much the measured ones were off."""
    runs = [calibration.measured(subject, plan_keys(candidate.config)) for candidate in findings.candidates]
    ratios = [
        run.step_s / candidate.time.step_s
        for run, candidate in zip(runs, findings.candidates, strict=True)
        if run is not None
    ]
    if not ratios:
        return findings
    scale = median(ratios)
    candidates = [
        replace(candidate, measured_step_s=run.step_s if run else None, scale=scale)
        for run, candidate in zip(runs, findings.candidates, strict=True)
    ]
    return replace(findings, candidates=tuple(sorted(candidates, key=lambda candidate: candidate.step_s)))


@dataclass(frozen=True)
class Options:
    """What a person asks of the planner, beside the recipe."""

    top: int = 5
    """Plans to show."""
    price: float | None = None
    """Of a device's hour."""
    calibrate: bool = False
    """Measure this machine and the best plans first. Processors only."""


def plan_recipe(recipe: Recipe, cluster: Cluster, options: Options) -> PlanReport:
    """Prepare the recipe's data, measure its model, and return the best plans on the cluster.

    Raises:
        RecipeError: the task or model cannot be had as the recipe says.
        DataError: the data cannot be read.
        PlanError: the model cannot be measured, no plan divides the batch, or calibration is not possible.
    """
    data = prepare(recipe)
    subject = subject_of(recipe, blueprint_of(recipe.model, data.facts).model, data)
    if options.calibrate:
        calibrate(subject, cluster, data)
    problem, findings = find_plans(subject, cluster)
    return report(recipe.name, problem, findings, subject.steps, options.top, options.price)
