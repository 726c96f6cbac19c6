"""Search a recipe's best values on the Ray cluster: python -m jobs.tune RECIPE [key=value …]"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from app.config import Recipe, TuneConfig
from app.errors import RecipeError
from app.runs import Outcome, Run
from app.storage import open_storage, write_atomically
from app.training.coordination.heartbeat import held
from app.training.ray_worker import resources_of
from app.training.resume import newest_unfinished
from app.training.run import prepare_run
from app.tuning.budget import Budget
from app.tuning.outcome import BEST_FILE, FrontTrial, StoppedMetrics, TuneMetrics, recipe_of
from app.tuning.report import write_report, write_trials
from app.tuning.schedulers import check_scheduler
from app.tuning.search import Search
from app.tuning.snapshots import keep_snapshots, scratch_folder
from app.tuning.space import Space, load_space
from app.tuning.storage import StudyPlace, study_place
from app.tuning.study import SearchStudy
from app.tuning.trainable import DATA
from app.tuning.trial_data import keep_data
from app.tuning.trial_recipe import trial_recipe
from jobs._cluster import connect, may_grow, require, require_dashboard
from jobs._runner import main
from jobs._sigterm import on_sigterm


def tune(run: Run) -> Outcome:
    """Check everything, run the trials, keep the recipe with the best values."""
    recipe, config = run.recipe, run.recipe.tune
    if config is None:
        raise RecipeError(f"recipe {recipe.name} has no tune section: give it one, with a space at least")
    space = load_space(config.space, recipe)
    scratch = run.until_result.enter_context(scratch_folder())
    place_of = partial(study_place, run.storage, config.storage, scratch.path)
    place = place_of(run.run_id)
    own = trial_recipe(recipe, {}, config)
    check_scheduler(config, own.train, space)
    data = prepare_run(replace(run, recipe=own))
    connect()
    workers = own.train.workers_range[1]
    require(resources_of(own.train, workers), "a trial's workers")
    if workers > 1:
        require_dashboard("a trial's workers")
    if config.scheduler == "pbt":
        require(resources_of(own.train, 2 * workers), "the two trials of the smallest population")
    study = _study(run, place_of, space, config)
    budget = Budget(config.stop, config.objectives[0], study.epochs_trained, study.seconds)
    search = Search(recipe, config, study, run.folder, budget, may_grow())
    run.hold(held(run.folder))
    with keep_snapshots(place, scratch) as secure:
        run.open()
        keep_data(data, own, run.folder / DATA)
        more = f", up to {search.max_at_once} as the cluster grows" if search.room() < search.at_once() else ""
        print(f"study {run.run_id} in {place}, {max(1, search.room())} trials at once{more}", flush=True)
        with on_sigterm(budget.ask, "the search goes on with tune.resume=true"):
            search.run(secure)
    return _outcome(run, search)


def _study(run: Run, place_of: Callable[[str], StudyPlace], space: Space, config: TuneConfig) -> SearchStudy:
    """The run's own study if it goes on, else a new one that knows what earlier ones found."""
    place = place_of(run.run_id)
    if run.was_opened:
        study = SearchStudy.resume(run.run_id, place, space, run.recipe, config)
        if place.remote is not None:
            print(
                f"the study is restored from {place}, written at {place.written}, with {len(study.trials)} trials and "
                f"{study.epochs_trained} epochs; results reported later are lost",
                flush=True,
            )
        return study
    earlier = [(name, place_of(name)) for name in config.warm_start]
    return SearchStudy.create(run.run_id, place, space, run.recipe, config, earlier)


def start_or_resume(job: str, recipe: Recipe) -> Run:
    """A new run; or with ``tune.resume`` the newest one of the recipe that has not finished.

    Raises:
        StorageError: that run is being tuned right now.
    """
    if recipe.tune is None or not recipe.tune.resume:
        return Run.start(job, recipe)
    run_id = newest_unfinished(open_storage(recipe.storage), job, recipe.name)
    if run_id is None:
        print(f"tune.resume: no search of {recipe.name} is unfinished; starting one", flush=True)
        return Run.start(job, recipe)
    print(f"search {run_id} goes on", flush=True)
    return Run.start(job, recipe, run_id)


def _outcome(run: Run, search: Search) -> Outcome:
    study, metrics = search.study, [each.metric for each in search.config.objectives]
    kept = {"study": str(study.place)}
    if search.budget.was_asked:
        stopped = StoppedMetrics(trials=len(study.ended), epochs_trained=study.epochs_trained)
        return Outcome(stopped, kept, status="stopped")
    reached = TuneMetrics.of(study, metrics, search.budget.reason or study.exhausted)
    best = FrontTrial(
        trial=reached.best_trial,
        epochs=reached.best_trial_epochs,
        values=reached.best_values,
        params=reached.best_params,
    )
    write_atomically(run.folder / BEST_FILE, recipe_of(run.recipe, best, run.run_id).encode())
    objectives = search.config.objectives
    made = {
        "best_recipe": run.folder / BEST_FILE,
        "report": write_report(study.study, objectives, reached, run.folder),
        "trials": write_trials(study.study, objectives, run.folder),
    }
    return Outcome(reached, kept | {name: str(path) for name, path in made.items()})


if __name__ == "__main__":
    sys.exit(main("tune", tune, start=start_or_resume))
