"""Useful tokens a second of two ways to make batches, in one process: python -m benchmarks.data.batches

Each way trains the same model from the same weights, and the ways take turns. A token is useful if it is no padding.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from app.config import Recipe, load_recipe
from app.data.prepared import PreparedData
from app.models.factory import blueprint_of
from app.tasks import find_task, prepare
from app.tasks.objective import objective_of
from app.training.activity import Activity
from app.training.data.feed import Feed
from app.training.data.order import SampleOrder
from app.training.data.recipe_order import count_steps, order_of
from app.training.data.rules import Rules
from app.training.data.samples import InMemory
from app.training.engine import create_engine
from app.training.worker import Worker, seed_random, start_worker
from benchmarks.machine import Conditions, machine, versions
from benchmarks.markdown import Goal, goals_table, table, verdict
from benchmarks.rounds import turns
from benchmarks.spread import Spread

RESULTS = Path(__file__).with_name("BATCHES.md")
RANDOM, BUDGET = "random, fixed batch size", "sorted in groups of 32, fixed token budget"
_SAMPLES, _GOAL, _TOLERANCE = 64, 1.5, 0.01


@dataclass(frozen=True)
class Trained:
    """One way to make batches, trained for some epochs."""

    tokens: int
    """Tokens that are no padding."""
    seconds: float
    """CPU time of the steps."""
    steps: int
    val_loss: float
    val_accuracy: float

    @property
    def rate(self) -> float:
        """Useful tokens a CPU second."""
        return self.tokens / self.seconds


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data.batches", description=__doc__)
    parser.add_argument("--recipe", default="recipes/reviews.yaml")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to write")
    arguments = parser.parse_args()
    conditions = Conditions()
    keys = ["train.workers=1", "train.plan={zero_stage: 0}", f"train.epochs={arguments.epochs}"]
    keys += ["train.linear_baseline=false", f"train.global_batch_size={_SAMPLES}"]
    recipe = load_recipe(arguments.recipe, keys)
    data, worker = prepare(recipe), start_worker(recipe.train)
    recipes = {RANDOM: recipe, BUDGET: _with_budget(recipe, data)}
    runs: dict[str, list[Trained]] = {name: [] for name in recipes}
    for number, names in enumerate(turns([*recipes], arguments.rounds)):
        for name in names:
            runs[name].append(_train(_seeded(recipes[name], number), data, worker, name))
    text = page(runs, arguments.recipe, arguments.epochs, conditions)
    arguments.results.write_text(text, encoding="utf-8")
    print(text)


def _with_budget(recipe: Recipe, data: PreparedData) -> Recipe:
    """Return the recipe with a token budget. Its batches have about as many samples on average."""
    lengths = data.train.padded_lengths
    assert lengths is not None
    tokens = {"global_batch_size": None, "tokens_per_batch": int(_SAMPLES * lengths.mean())}
    return recipe.with_plan(recipe.train.plan, **tokens)


def _seeded(recipe: Recipe, seed: int) -> Recipe:
    return recipe.with_plan(recipe.train.plan, seed=seed)


def _train(recipe: Recipe, data: PreparedData, worker: Worker, name: str) -> Trained:
    """Train, and validate at the end."""
    config, layout, activity = recipe.train, recipe.train.layout(1), Activity()
    seed_random(config.seed)
    order = order_of(recipe, data)
    if name == RANDOM:  # samples of equal lengths are not sorted
        order = SampleOrder(InMemory(np.zeros(len(data.train), np.int64)), Rules(_SAMPLES), config.seed)
    objective = objective_of(find_task(recipe.task), config, data)
    blueprint = copy.deepcopy(blueprint_of(recipe.model, data.facts))
    engine = create_engine(blueprint, config, layout, count_steps(recipe, order), objective)
    feed = Feed(data, config, layout, worker, activity, order)
    tokens, seconds, steps = 0, 0.0, 0
    for epoch in range(1, config.epochs + 1):
        batches = feed.train(epoch, range(order.num_batches(epoch)))
        for _ in range(order.num_batches(epoch)):
            began = time.process_time()
            engine.train_step(islice(batches, layout.gradient_accumulation), activity)
            seconds += time.process_time() - began
            assert feed.loader.last is not None
            tokens += int(feed.loader.last.inputs["attention_mask"].sum())
            steps += 1
    values = engine.objective.values(*engine.evaluate(feed.validation()))
    feed.close()
    engine.deepspeed.destroy()
    return Trained(tokens, seconds, steps, values["val_loss"], values["val_accuracy"])


def page(runs: Mapping[str, Sequence[Trained]], recipe: str, epochs: int, conditions: Conditions) -> str:
    """Return the page of some rounds."""
    rates = {name: Spread(tuple(run.rate for run in found)) for name, found in runs.items()}
    times = rates[BUDGET].over(rates[RANDOM])
    scores = {name: [run.val_accuracy for run in found] for name, found in runs.items()}
    lost = [random - budget for random, budget in zip(scores[RANDOM], scores[BUDGET], strict=True)]
    spread = max(scores[RANDOM]) - min(scores[RANDOM])
    reached = f"{statistics.mean(lost):+.4f} ({min(lost):+.4f} to {max(lost):+.4f})"
    goals = [
        Goal(
            "useful tokens a second, relative to random batches",
            f"≥ {_GOAL}",
            str(times),
            verdict(times.median >= _GOAL),
        ),
        Goal("loss of val_accuracy", f"≤ {_TOLERANCE}", reached, verdict(statistics.mean(lost) <= _TOLERANCE)),
    ]
    rows = [
        [
            name,
            f"{rates[name].median:,.0f}",
            f"{found[0].steps:,}",
            " ".join(f"{run.val_loss:.4f}" for run in found),
            " ".join(f"{run.val_accuracy:.4f}" for run in found),
        ]
        for name, found in runs.items()
    ]
    return f"""# Batches of texts

Written by `python -m benchmarks.data.batches --epochs {epochs} --rounds {len(lost)}`. A process trains the model of
`{recipe}` with each kind of batches, in turns. Each round has its own seed. Epochs: {epochs}. A token is useful unless
it is padding. The time is CPU time. Ratios and accuracy losses compare runs with the same seed. With random
batches, the accuracies of different seeds differ by up to {spread:.4f}.

{machine()}.
{versions(["torch", "deepspeed"])}.
{conditions}

{goals_table(goals)}

{table(["batches", "useful tokens/s", "steps", "val_loss, by round", "val_accuracy, by round"], rows)}
"""


if __name__ == "__main__":
    main()
