"""Train without Ray: torchrun --nproc-per-node 2 -m app.training RECIPE [key=value …]"""

import os
import pickle
import sys
from functools import partial

from app.artifacts import DATA
from app.config import Recipe, load_recipe
from app.config.overrides import require_once
from app.errors import RayloomError, UnsharedStorageError
from app.process_state import keep_freed_memory, spare_loopback
from app.runs import Outcome, Run, execute, read_arguments
from app.storage import absolute_location, to_path
from app.tasks import load_prepared
from app.training.coordination.preparing import preparing, wait_for_first
from app.training.coordination.shared_folder import marked, require_shared
from app.training.coordination.topology import require_groups_within_nodes
from app.training.plan import TrainingPlan
from app.training.publication import finish_run
from app.training.resume import start_or_resume
from app.training.run import open_run, prepare_run
from app.training.session import train
from app.training.worker import Worker, leave_process_group, start_worker


def main(argv: list[str] | None = None) -> int:
    """Train as one process of ``torchrun``, or alone. Return 0, 1 if it failed, or 2 if the recipe was refused."""
    spare_loopback()
    arguments = read_arguments("app.training", argv, __doc__)
    try:
        require_once(arguments.overrides)
        recipe = _load(arguments.recipe, arguments.overrides)
        worker = start_worker(recipe.train)
        if worker.is_first:
            result = execute(_start(worker, recipe), partial(_lead, worker))
            print(result.to_line(arguments.json), flush=True)
            return int(result.status == "failed")
        _follow(worker)
    except RayloomError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        leave_process_group()
    return 0


def _load(path: str, overrides: list[str]) -> Recipe:
    """Load the recipe for this number of processes. A relative storage path is resolved in the current folder."""
    # torchrun decides the number of processes, so it comes last and beats the recipe.
    recipe = load_recipe(path, [*overrides, f"train.workers={os.environ.get('WORLD_SIZE', '1')}"])
    return recipe.model_copy(update={"storage": recipe.storage and absolute_location(recipe.storage)})


def _start(worker: Worker, recipe: Recipe) -> Run:
    try:
        return start_or_resume("train", recipe)
    except BaseException:
        # Leaving it ends the others' wait in ``wait_for_first``.
        with preparing(worker):
            pass
        # The other processes wait for this broadcast.
        worker.broadcast(None)
        raise


def _lead(worker: Worker, run: Run) -> Outcome:
    """Train as the first process, which also prepares the data, opens the run and publishes the best weights."""
    try:
        with preparing(worker):
            plan, data = prepare_run(run)
            open_run(run, plan, data)
    except BaseException:
        worker.broadcast(None)
        raise
    # The mark has to be there until every process has looked for it.
    with marked(run.folder) as mark:
        worker.broadcast((str(run.folder), mark, plan.to_bytes()))
        require_shared(worker, run.folder, mark)
    require_groups_within_nodes(worker, plan.recipe.train.plan)
    keep_freed_memory()  # not before: training would get what preparation took on top of its own
    return finish_run(run, data, train(plan, data, worker, run.folder))


def _follow(worker: Worker) -> None:
    """Train as another process, on the data that the first has prepared."""
    wait_for_first(worker)
    started: tuple[str, str, bytes] | None = worker.broadcast()
    if started is None:
        return  # the first process reports why
    folder, mark = to_path(started[0]), started[1]
    plan: TrainingPlan = pickle.loads(started[2])  # noqa: S301 # from our own first process
    try:
        require_shared(worker, folder, mark)
    except UnsharedStorageError:
        return  # the first process reports it
    require_groups_within_nodes(worker, plan.recipe.train.plan)
    keep_freed_memory()
    train(plan, load_prepared(plan.recipe, folder / DATA), worker, folder)


if __name__ == "__main__":
    sys.exit(main())
