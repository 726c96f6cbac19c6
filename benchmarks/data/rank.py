"""A rank that trains on a corpus in shards on S3, and the memory that it takes; run under torchrun."""

import sys
from itertools import islice

from pydantic import BaseModel

from app.config import Recipe, load_recipe
from app.models.factory import blueprint_of
from app.storage import to_path
from app.tasks import find_task, load_prepared
from app.tasks.objective import objective_of
from app.training.activity import Activity
from app.training.data.feed import Feed
from app.training.data.recipe_order import count_steps, order_of
from app.training.engine import create_engine
from app.training.worker import gather, leave_process_group, start_worker
from benchmarks.data.memory import PeakMemory, private_bytes
from benchmarks.data.steps import recipe_of

BATCH, WINDOWS, STEPS = 128, 8, 25
"""Samples of a global batch, and how many windows are trained on, in so many steps each."""


class RankMemory(BaseModel):
    """Private memory (USS) of a rank in bytes, with the pages of shards that it has mapped."""

    with_model: int
    """With the engine initialized, before data are read."""
    peak: int
    steps: int
    samples: int
    rows: int
    """Rows of the training split."""


def training_recipe() -> Recipe:
    """The recipe of reviews with a small model, so that data takes most of the memory."""
    recipe = recipe_of("examples", "s3://unused", "s3://unused")
    model = recipe.model.model_copy(update={"args": {"layers": 1, "width": 32, "heads": 2}})
    keys = ["train.workers=2", f"train.global_batch_size={BATCH}", "train.plan={zero_stage: 0}"]
    train = load_recipe("recipes/reviews.yaml", [*keys, "train.linear_baseline=false"]).train
    return recipe.model_copy(update={"model": model, "train": train})


def train(served: str) -> list[RankMemory] | None:
    """Train on windows spread over the first epoch. Return the memory of all ranks in the first one."""
    recipe = training_recipe()
    config, layout, worker, activity = recipe.train, recipe.train.layout(2), start_worker(recipe.train), Activity()
    data = load_prepared(recipe, to_path(served))
    order = order_of(recipe, data)
    objective = objective_of(find_task(recipe.task), config, data)
    steps, blueprint = count_steps(recipe, order), blueprint_of(recipe.model, data.facts)
    engine = create_engine(blueprint, config, layout, steps, objective)
    feed = Feed(data, config, layout, worker, activity, order)
    memory = RankMemory(with_model=private_bytes(), peak=0, steps=0, samples=0, rows=len(data.train))
    with PeakMemory() as peak:
        for window in range(WINDOWS):
            first = window * (order.num_batches(1) - STEPS) // WINDOWS
            batches = feed.train(1, range(first, first + STEPS))
            for _ in range(STEPS):
                engine.train_step(islice(batches, layout.gradient_accumulation), activity)
                assert feed.loader.last is not None
                memory.samples += len(feed.loader.last.targets)
            memory.steps += STEPS
    feed.close()
    memory.peak = peak.peak
    found = gather(memory)
    return found if worker.is_first else None


if __name__ == "__main__":
    for line in train(sys.argv[1]) or []:
        print(line.model_dump_json())
    leave_process_group()
