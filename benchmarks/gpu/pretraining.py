"""A large GPT on GPUs: torchrun --nproc-per-node 1 -m benchmarks.gpu.pretraining RECIPE… [key=value …]

Train each recipe's model under its own plan on random tokens. Print tokens/s, model FLOPs utilisation and peak memory.
Overrides, such as train.torch_compile=false, apply to all recipes.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import median

import torch

from app.config import PlanConfig, Recipe, load_recipe
from app.models.factory import blueprint_of, build_model
from app.models.precision import TORCH_DTYPES
from app.planner.cluster import Cluster
from app.planner.measure import measure as profile_of
from app.planner.plan import parallel_plan
from app.planner.search import Candidate, price_plan
from app.planner.validation import validation_of
from app.storage import no_op
from app.telemetry.mfu import flops_per_sample, peak_flops, utilisation
from app.telemetry.record import MemoryRecord, memory_record
from app.training.activity import Activity
from app.training.data.feed import MicroBatch
from app.training.engine import TrainingEngine, create_engine
from app.training.engine.deepspeed_engine import Factors
from app.training.planning.recipe import Subject, problem_of
from app.training.worker import Worker, leave_process_group, start_worker
from benchmarks.gpu.bench import GOAL_MFU, Bench
from benchmarks.gpu.floors import gpt_facts, training_floor

_HEADER = ("model", "parameters", "step", "tokens/s", "MFU", "peak memory")
_WARM_UP, _STEPS = 4, 8
SMALL = (
    "train.device=cpu",
    "model.args={layers: 2, width: 32, heads: 2}",
    "data.tokenizer.vocab_size=300",
    "data.block_length=16",
    "train.global_batch_size=4",
    "train.plan.micro_batch=2",
)
"""Overrides to test a recipe on a CPU."""


@dataclass(frozen=True)
class Reached:
    """The measurements of one model."""

    name: str
    num_parameters: int
    step_s: float
    """Median seconds of an optimizer step."""
    tokens_per_s: float
    """Tokens per second over all workers."""
    mfu: float | None
    memory: MemoryRecord
    """The first worker's peak: on a GPU of its tensors, on a CPU of the whole process."""
    held_bytes: int
    """Bytes of the first worker's tensors between two steps. 0 on a CPU, because torch does not count there."""
    loss_scale: float | None
    """The loss scale of the last step, for fp16."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the cells of a table row."""
        return (
            self.name,
            f"{self.num_parameters:,}",
            f"{self.step_s * 1e3:,.1f} ms",
            f"{self.tokens_per_s:,.0f}",
            "unknown" if self.mfu is None else f"{self.mfu:.3f}",
            f"{self.memory.peak_bytes / 2**30:.1f} GiB",
        )


def main() -> None:
    """Measure the recipes one after another."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.pretraining", description=__doc__)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE or key=value")
    parser.add_argument("--steps", type=int, default=20, help="timed optimizer steps")
    parser.add_argument("--warm-up", type=int, default=5, help="warm-up steps before these; the first one compiles")
    arguments = parser.parse_args()
    overrides = [word for word in arguments.recipes if "=" in word]
    overrides.append(f"train.workers={os.environ.get('WORLD_SIZE', '1')}")
    recipes = [load_recipe(word, overrides) for word in arguments.recipes if "=" not in word]
    worker = start_worker(recipes[0].train)
    worker.print(_row(_HEADER))
    for recipe in recipes:
        worker.print(_row(measure(recipe, worker, arguments.warm_up, arguments.steps).cells))
    worker.print(f"goal: MFU {GOAL_MFU} or more on one H100-class GPU")
    leave_process_group()


def measure_step(bench: Bench, recipe: str, overrides: Sequence[str]) -> None:
    """Measure one recipe on one GPU, and record it beside the floor and the planner's prediction."""
    loaded = load_recipe(recipe, [*overrides, *(SMALL if bench.is_small else ())])
    steps = count(1)

    def record_step(seconds: float) -> None:
        # Print at once, so that the log of a killed step shows its progress.
        bench.figure(f"step {next(steps)}", 1e3 * seconds, "ms")

    reached = measure(loaded, start_worker(loaded.train), _WARM_UP, _STEPS, record_step)
    bench.compare_with_floor("median step", reached.step_s, training_floor(loaded), loaded.train.precision)
    bench.figure("tokens", reached.tokens_per_s, "/s")
    if reached.mfu is not None:
        is_goal = bench.device == "gpu" and loaded.train.torch_compile and loaded.train.plan.zero_stage == 1
        bench.compare("MFU", reached.mfu, "", GOAL_MFU, "goal", reached.mfu >= GOAL_MFU if is_goal else None)
    if reached.loss_scale is not None:
        bench.figure("loss scale after the steps", reached.loss_scale)
    if bench.device == "gpu":
        _compare_with_planner(bench, loaded, reached)
    else:
        bench.figure("peak memory of the process", reached.memory.peak_bytes / 2**30, "GiB")


def _compare_with_planner(bench: Bench, recipe: Recipe, reached: Reached) -> None:
    """Record the step's time and memory beside what ``rayloom plan`` predicts for the card."""
    bench.figure("fragmentation", reached.memory.fragmentation or 0.0)
    predicted = predict(recipe, bench.cluster)
    if predicted is None:
        bench.figure("planner", "says that the plan does not fit")
        return
    validation = validation_of(bench.cluster.device, predicted.config)
    # The planner's rates come from runs without torch's compiler.
    is_validated = validation is not None and not recipe.train.torch_compile
    within = abs(reached.step_s / predicted.step_s - 1) <= validation.p90 if validation and is_validated else None
    source = f"planner, ± {validation.p90:.0%}" if validation else "planner, not validated"
    bench.compare("step beside the planner", 1e3 * reached.step_s, "ms", 1e3 * predicted.step_s, source, within)
    states, memory = predicted.memory.states, predicted.memory.total - predicted.memory.context
    bench.compare("memory held between steps", reached.held_bytes / 2**30, "GiB", states / 2**30, "ZeRO's formula")
    peak = reached.memory.peak_bytes
    bench.compare("peak memory", peak / 2**30, "GiB", memory / 2**30, "planner: formula, activations and buffers")


def predict(recipe: Recipe, cluster: Cluster) -> Candidate | None:
    """Return what ``rayloom plan`` predicts for the recipe's own plan on ``cluster``; None if the plan does not fit.

    Raises:
        PlanError: the model cannot be measured.
    """
    config, facts = recipe.train, gpt_facts(recipe)
    assert isinstance(config.plan, PlanConfig)
    tokens = torch.zeros(1, facts["max_length"], dtype=torch.int64)
    profile = profile_of(blueprint_of(recipe.model, facts).model, {"input_ids": tokens}, config.precision)
    problem = problem_of(Subject(recipe, profile, ("input_ids",), steps=1, name=recipe.name), cluster)
    return price_plan(problem, config.plan, parallel_plan(config.plan, config.layout(1)))


def measure(
    recipe: Recipe, worker: Worker, warm_up: int, steps: int, on_step: Callable[[float], None] = no_op
) -> Reached:
    """Train the recipe's model for ``warm_up`` and then ``steps`` optimizer steps. Peak memory covers only this recipe.

    Args:
        on_step: called with the seconds of each step.
    """
    config, facts = recipe.train, gpt_facts(recipe)
    with torch.device("meta"):
        shape = build_model(recipe.model, facts)
        sample = torch.zeros(1, facts["max_length"], dtype=torch.int64)
    flops = flops_per_sample(shape, {"input_ids": sample})
    if worker.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    num_parameters = sum(parameter.numel() for parameter in shape.parameters())
    engine, batches = start_engine(recipe, worker, warm_up + steps)
    step_s = _time_steps(engine, batches, worker, warm_up, steps, on_step)
    samples_per_s = config.batch_size / step_s
    peak = peak_flops(worker.device, TORCH_DTYPES[config.precision])
    reached = Reached(
        name=recipe.name,
        num_parameters=num_parameters,
        step_s=step_s,
        tokens_per_s=samples_per_s * facts["max_length"],
        mfu=utilisation(samples_per_s, flops, worker.size, peak),
        memory=memory_record(worker.device),
        held_bytes=torch.cuda.memory_allocated() if worker.device.type == "cuda" else 0,
        loss_scale=Factors.of(engine.deepspeed).loss_scale,
    )
    engine.deepspeed.destroy()
    return reached


def start_engine(recipe: Recipe, worker: Worker, total_steps: int) -> tuple[TrainingEngine, list[MicroBatch]]:
    """Return an engine for the recipe's model, and one step's micro-batches of random tokens on the worker's device."""
    config, facts = recipe.train, gpt_facts(recipe)
    layout = config.layout(worker.size)
    torch.manual_seed(config.seed)
    shape = (layout.micro_batch, facts["max_length"])
    tokens = torch.randint(facts["vocab_size"], shape, device=worker.device)
    engine = create_engine(blueprint_of(recipe.model, facts), config, layout, total_steps)
    return engine, [MicroBatch({"input_ids": tokens}, tokens)] * layout.gradient_accumulation


def _time_steps(
    engine: TrainingEngine,
    batches: Sequence[MicroBatch],
    worker: Worker,
    warm_up: int,
    steps: int,
    on_step: Callable[[float], None],
) -> float:
    """Return the median seconds of a step after the warm-up. Wait for the device after each step."""
    seconds = []
    for _ in range(warm_up + steps):
        began = time.perf_counter()
        engine.train_step(iter(batches), Activity())
        if worker.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        on_step(seconds[-1])
    return median(seconds[warm_up:])


def _row(cells: tuple[str, ...]) -> str:
    return "".join(f"{cell:<16}" for cell in cells)


if __name__ == "__main__":
    main()
