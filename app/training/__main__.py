"""Train without Ray: torchrun --nproc-per-node 2 -m app.training RECIPE [key=value …]"""

import argparse
import os
import sys
from functools import partial

import torch
from upath import UPath

from app.config import Recipe, load_recipe
from app.data.prepared import PreparedData
from app.errors import RayloomError
from app.runs import Outcome, Run, execute
from app.storage import absolute_location
from app.tasks import find_processor
from app.training.local_reporter import LocalReporter
from app.training.loop import train
from app.training.records import best_of
from app.training.run import finish_run, prepare_run
from app.training.run_folder import CHECKPOINTS, DATA
from app.training.worker import Worker, start_worker


def main(argv: list[str] | None = None) -> int:
    """Train as one process of ``torchrun``, or alone. Returns 0, 1 if it failed, or 2 if the recipe was refused."""
    parser = argparse.ArgumentParser(prog="python -m app.training", description=__doc__)
    parser.add_argument("recipe", help="path of a recipe, such as recipes/digits.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as train.epochs=3; beats the recipe")
    arguments = parser.parse_args(argv)
    try:
        recipe = _load(arguments.recipe, arguments.overrides)
        worker = start_worker(recipe.train.device)
        if worker.is_first:
            result = execute(Run.start("train", recipe), partial(_lead, worker))
            print(result.to_line(), flush=True)
            return 0 if result.status == "succeeded" else 1
        _follow(worker, recipe)
    except RayloomError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return 0


def _load(path: str, overrides: list[str]) -> Recipe:
    """The recipe with as many workers as there are processes, and storage as a person in this folder means it."""
    recipe = load_recipe(path, [*overrides, f"train.workers={os.environ.get('WORLD_SIZE', '1')}"])
    return recipe.model_copy(update={"storage": recipe.storage and absolute_location(recipe.storage)})


def _lead(worker: Worker, run: Run) -> Outcome:
    """The first process prepares the data, opens the run and keeps the best weights."""
    try:
        data = prepare_run(run)
        run.open()
        data.save(run.folder / DATA)
    except BaseException:
        _tell_followers(None)
        raise
    _tell_followers(run.folder)
    reporter = LocalReporter(run.folder / CHECKPOINTS, run.recipe.train)
    records = train(run.recipe, data, worker, run.folder, reporter)
    best = best_of(records, run.recipe.train)
    return finish_run(run, data, best, records[-1], reporter.checkpoint_of(best))


def _tell_followers(folder: UPath | None) -> None:
    """Where the run lies; None if there will be none."""
    torch.distributed.broadcast_object_list([folder and str(folder)], src=0)


def _follow(worker: Worker, recipe: Recipe) -> None:
    """Every other process trains on what the first has prepared."""
    message: list[str | None] = [None]
    torch.distributed.broadcast_object_list(message, src=0)
    if message[0] is None:
        return  # the first process says why
    folder = UPath(message[0])
    data = PreparedData.load(folder / DATA, find_processor(recipe.task))
    train(recipe, data, worker, folder, LocalReporter(folder / CHECKPOINTS, recipe.train))


if __name__ == "__main__":
    sys.exit(main())
