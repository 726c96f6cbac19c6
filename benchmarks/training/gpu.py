"""A large GPT on GPUs: torchrun --nproc-per-node 1 -m benchmarks.training.gpu RECIPE… [key=value …]

Prints tokens/s, model FLOPs utilisation and peak memory of each recipe's model under the recipe's plan, trained on
random tokens. Overrides are for all of them, such as train.torch_compile=false.
"""

import argparse
import os
import time
from dataclasses import dataclass
from itertools import repeat
from statistics import median

import torch

from app.config import Recipe, load_recipe
from app.models.factory import blueprint_of, build_model
from app.models.precision import TORCH_DTYPES
from app.telemetry.mfu import flops_per_sample, peak_flops, utilisation
from app.telemetry.record import memory_record
from app.training.activity import Activity
from app.training.data.feed import MicroBatch
from app.training.engine import TrainingEngine, create_engine
from app.training.worker import Worker, leave_process_group, start_worker

GOAL_MFU = 0.5
_HEADER = ("model", "parameters", "step", "tokens/s", "MFU", "peak memory")


@dataclass(frozen=True)
class Reached:
    """The measurements of one model."""

    name: str
    num_parameters: int
    step_s: float
    """Median seconds of an optimizer step."""
    tokens_per_s: float
    """Tokens per second of all workers together."""
    mfu: float | None
    peak_bytes: int
    """Peak memory of the first worker: of the tensors on its GPU, or on a CPU of the whole process."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table's row."""
        return (
            self.name,
            f"{self.num_parameters:,}",
            f"{self.step_s * 1e3:,.1f} ms",
            f"{self.tokens_per_s:,.0f}",
            "unknown" if self.mfu is None else f"{self.mfu:.3f}",
            f"{self.peak_bytes / 2**30:.1f} GiB",
        )


def main() -> None:
    """Measure every recipe, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.gpu", description=__doc__)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE or key=value")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps that are timed")
    parser.add_argument("--warm-up", type=int, default=5, help="optimizer steps before these; the first one compiles")
    arguments = parser.parse_args()
    overrides = [word for word in arguments.recipes if "=" in word]
    overrides.append(f"train.workers={os.environ.get('WORLD_SIZE', '1')}")
    recipes = [load_recipe(word, overrides) for word in arguments.recipes if "=" not in word]
    worker = start_worker(recipes[0].train)
    if worker.is_first:
        _print_row(_HEADER)
    for recipe in recipes:
        reached = measure(recipe, worker, arguments.warm_up, arguments.steps)
        if worker.is_first:
            _print_row(reached.cells)
    if worker.is_first:
        print(f"goal: MFU {GOAL_MFU} or more on one H100-class GPU", flush=True)
    leave_process_group()


def measure(recipe: Recipe, worker: Worker, warm_up: int, steps: int) -> Reached:
    """Train the recipe's model for ``warm_up`` and then ``steps`` optimizer steps. Peak memory is this recipe's."""
    config, length = recipe.train, recipe.data.block_length
    facts = {"vocab_size": recipe.data.tokenizer.vocab_size, "max_length": length}
    with torch.device("meta"):
        shape = build_model(recipe.model, facts)
    tokens = torch.randint(facts["vocab_size"], (config.layout(worker.size).micro_batch, length), device=worker.device)
    flops = flops_per_sample(shape, {"input_ids": tokens[:1].to("meta")})
    if worker.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(config.seed)
    blueprint = blueprint_of(recipe.model, facts)
    num_parameters = blueprint.num_parameters
    engine = create_engine(blueprint, config, config.layout(worker.size), total_steps=warm_up + steps)
    step_s = _time_steps(engine, MicroBatch({"input_ids": tokens}, tokens), recipe, worker, warm_up, steps)
    samples_per_s = config.batch_size / step_s
    peak = peak_flops(worker.device, TORCH_DTYPES[config.precision])
    reached = Reached(
        name=recipe.name,
        num_parameters=num_parameters,
        step_s=step_s,
        tokens_per_s=samples_per_s * length,
        mfu=utilisation(samples_per_s, flops, worker.size, peak),
        peak_bytes=memory_record(worker.device).peak_bytes,
    )
    engine.deepspeed.destroy()
    return reached


def _time_steps(
    engine: TrainingEngine, batch: MicroBatch, recipe: Recipe, worker: Worker, warm_up: int, steps: int
) -> float:
    """Median seconds of a step after the warm-up, each waited for."""
    accumulation = recipe.train.layout(worker.size).gradient_accumulation
    seconds = []
    for _ in range(warm_up + steps):
        began = time.perf_counter()
        engine.train_step(repeat(batch, accumulation), Activity())
        if worker.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return median(seconds[warm_up:])


def _print_row(cells: tuple[str, ...]) -> None:
    print("".join(f"{cell:<16}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
