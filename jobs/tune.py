"""Search for a recipe's best values on the Ray cluster: python -m jobs.tune RECIPE [key=value …]"""

import sys
from collections.abc import Callable
from functools import partial

from app.artifacts import DATA
from app.config import Recipe, TuneConfig, load_stored_recipe
from app.errors import RecipeError
from app.heartbeat import run_lock
from app.runs import CONFIG_FILE, Outcome, Run
from app.storage import open_storage, write_atomically
from app.telemetry.tracing import stage
from app.training.ray_worker import resources_of
from app.training.resume import newest_unfinished, require_unfinished
from app.tuning.budget import SearchBudget
from app.tuning.outcome import BEST_FILE, ParetoTrial, StoppedSearchMetrics, TuneMetrics, best_yaml
from app.tuning.report import write_report, write_trials
from app.tuning.schedulers import check_scheduler
from app.tuning.search import Search
from app.tuning.snapshots import keep_snapshots, scratch_folder
from app.tuning.space import Space, load_space
from app.tuning.storage import StudyLocation, locate_study
from app.tuning.study import SearchStudy
from app.tuning.trial_config import trial_recipe
from app.tuning.trial_data import add_plans, keep_data, prepare_trials, with_versions
from jobs._cluster import connect, may_grow, require, require_dashboard, training_cluster
from jobs._runner import main, on_sigterm
from jobs._shards import prepare_on_cluster
from jobs._turn import in_turn


def tune(run: Run) -> Outcome:
    """Check everything, run the trials, and write the recipe with the best values."""
    recipe, config = run.recipe, run.recipe.tune
    if config is None:
        raise RecipeError(f"recipe {recipe.name} has no tune section: add one with at least a space").of(
            "recipe.missing", "tune"
        )
    space = load_space(config.space, recipe)
    scratch = run.until_result.enter_context(scratch_folder())
    locate = partial(locate_study, run.storage, config.storage, scratch.path)
    location = locate(run.run_id)
    check_scheduler(config, trial_recipe(recipe, {}, config).train, space)
    with stage("prepare"):
        prepare_on_cluster(run)
        data, recipe = prepare_trials(run, config, space, training_cluster)
    own_trial = trial_recipe(recipe, {}, config)
    space = add_plans(space, own_trial, data, config, training_cluster(own_trial.train))
    connect()
    workers = own_trial.train.workers_range[1]
    require(resources_of(own_trial.train, workers), "a trial's workers", own_trial.train.labels)
    if workers > 1:
        require_dashboard("a trial's workers")
    # It compares trials that run at the same time.
    if config.scheduler == "pbt":
        smallest = "the two trials of the smallest population"
        require(resources_of(own_trial.train, 2 * workers), smallest, own_trial.train.labels)
    study = _study(run, locate, space, config)
    budget = SearchBudget(config.stop, config.objectives[0], study.epochs_trained, study.seconds)
    search = Search(recipe, config, study, run.folder, budget, may_grow())
    run.hold(run_lock(run.folder))
    require_unfinished(run)
    # The first copy is made before the run is opened, so that a run that can be resumed has its study.
    with keep_snapshots(location, scratch) as back_up:
        run.open()
        keep_data(data, own_trial, run.folder / DATA)
        capacity = search.capacity()
        growth = f", up to {search.max_concurrency} as the cluster grows" if capacity < search.concurrency() else ""
        print(f"study {run.run_id} in {location}, {max(1, capacity)} trials at once{growth}", flush=True)
        with stage("trials"), on_sigterm(budget.request_stop, "resume the search with tune.resume=true"):
            search.run(back_up)
    return _outcome(run, search)


def tune_demand(recipe: Recipe) -> dict[str, float]:
    """Return the resources of the smallest number of trials that a search can run with, for the queue."""
    if recipe.tune is None:
        return {}
    config = trial_recipe(recipe, {}, recipe.tune).train
    return resources_of(config, config.workers_range[1] * (2 if recipe.tune.scheduler == "pbt" else 1))


def _study(run: Run, locate: Callable[[str], StudyLocation], space: Space, config: TuneConfig) -> SearchStudy:
    """Load the study of a resumed run, else create one that learns from the studies of ``tune.warm_start``."""
    location = locate(run.run_id)
    if run.was_opened:
        study = SearchStudy.resume(run.run_id, location, space, run.recipe, config)
        if location.remote is not None:
            content = f"{len(study.trials)} trials and {study.epochs_trained} epochs"
            print(
                f"the study is restored from {location}, written at {location.written}, with {content}; results "
                "reported later are lost",
                flush=True,
            )
        return study
    space = with_versions(space, run.storage)
    earlier = [(name, locate(name)) for name in config.warm_start]
    return SearchStudy.create(run.run_id, location, space, run.recipe, config, earlier)


def start_or_resume(job: str, recipe: Recipe) -> Run:
    """Start a new run, or with ``tune.resume`` resume the recipe's newest unfinished one.

    Raises:
        StorageError: another job is tuning that run.
    """
    if recipe.tune is None or not recipe.tune.resume:
        return Run.start(job, recipe)
    run_id = newest_unfinished(open_storage(recipe.storage), job, recipe.name)
    if run_id is None:
        print(f"tune.resume: no search of {recipe.name} is unfinished; starting one", flush=True)
        return Run.start(job, recipe)
    print(f"resuming search {run_id}", flush=True)
    return keep_found(Run.start(job, recipe, run_id))


def keep_found(search: Run) -> Run:
    """Keep what an earlier job of the search resolved. Raise RecipeError if its recipe cannot be read."""
    search.recipe = search.recipe.as_found_by(load_stored_recipe(str(search.folder / CONFIG_FILE)))
    return search


def _outcome(run: Run, search: Search) -> Outcome:
    study, names = search.study, [objective.metric for objective in search.config.objectives]
    artifacts = {"study": str(study.location)}
    if search.budget.stop_requested:
        stopped = StoppedSearchMetrics(trials=len(study.ended), epochs_trained=study.epochs_trained)
        return Outcome(stopped, artifacts, status="stopped")
    metrics = TuneMetrics.of(study, names, search.budget.reason or study.exhausted)
    best = ParetoTrial(
        trial=metrics.best_trial,
        epochs=metrics.best_trial_epochs,
        values=metrics.best_values,
        params=metrics.best_params,
    )
    write_atomically(run.folder / BEST_FILE, best_yaml(run.recipe, best, run.run_id).encode())
    objectives = search.config.objectives
    files = {
        "best_recipe": run.folder / BEST_FILE,
        "report": write_report(study.study, objectives, metrics, run.folder),
        "trials": write_trials(study.study, objectives, run.folder),
    }
    return Outcome(metrics, artifacts | {name: str(path) for name, path in files.items()})


if __name__ == "__main__":
    sys.exit(main("tune", in_turn(tune, tune_demand), start=start_or_resume))
