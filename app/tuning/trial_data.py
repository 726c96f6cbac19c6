"""The prepared data of trials: prepared once for all trials with the same data, and kept in memory between trials."""

import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from upath import UPath

from app.checksums import CHECKSUMS_FILE, sha256_of
from app.config import AutoPlan, PlanConfig, Recipe, TrainConfig, TuneConfig
from app.data.prepared import PreparedData
from app.errors import RecipeError
from app.planner.cluster import Cluster
from app.repository.repository import Repository
from app.runs import Run
from app.storage import is_local
from app.tasks import find_task, load_prepared, prepare
from app.training.planning.recipe import fastest_plans
from app.training.run import prepare_run
from app.tuning.space import Space
from app.tuning.trial_config import trial_recipe


def prepare_trials(
    run: Run, config: TuneConfig, space: Space, find_cluster: Callable[[TrainConfig], Cluster]
) -> tuple[PreparedData, Recipe]:
    """Check a trial with the recipe's own values, and return its data and the recipe that all trials vary.

    The run's recipe records what a pretrained model's folder holds, and the versions of published models. So
    they are the same in all trials and in the best recipe.
    A plan of ``auto`` is chosen once for all trials, since they would hardly be comparable otherwise. It is ZeRO 1
    where the space draws what a plan is chosen by.

    Raises:
        RayloomError: what ``prepare_run`` raises.
    """
    find_task(run.recipe.task).require(run.recipe)  # a trial's recipe has no tune section
    trial = trial_recipe(run.recipe, {}, config)
    if isinstance(trial.train.plan, AutoPlan) and (key := space.key_that_plans_depend_on):
        print(f"train.plan auto: ZeRO 1 unless the space says otherwise, since it gives {key}", flush=True)
        trial = trial.with_plan(PlanConfig())
    plan, data = prepare_run(replace(run, recipe=trial), find_cluster)
    run.recipe = run.recipe.as_found_by(plan.recipe)
    return data, run.recipe.with_plan(plan.recipe.train.plan)


def add_plans(space: Space, recipe: Recipe, data: PreparedData, config: TuneConfig, cluster: Cluster) -> Space:
    """Return the space with the planner's fastest plans for a trial, if ``tune.plans`` asks for some.

    Raises:
        RecipeError: the space gives a key by which plans are chosen.
        PlanError: the model cannot be measured, or no plan fits.
    """
    if config.plans is None:
        return space
    if key := space.key_that_plans_depend_on:
        raise RecipeError(
            f"tune.plans is for one model, data and batch, and tune.space gives {key}: drop one of both"
        ).of("plans.one_model", "tune.plans")
    plans = fastest_plans(recipe, data, cluster, config.plans)
    print(f"tune.plans: {'; '.join(plans)}", flush=True)
    return space.with_plans(plans)


def with_versions(space: Space, storage: UPath) -> Space:
    """Return the space with the production version of each model that it gives by name, for all trials alike.

    Raises:
        StorageError: a model has no version in production.
    """
    repository = Repository(storage)
    versions = {name: f"{name}/{repository.production(name)}" for name in space.unversioned}
    for name, version in sorted(versions.items()):
        print(f"{name} in tune.space: {version} in all trials", flush=True)
    return replace(space, versions=versions)


def prepare_data(recipe: Recipe, folder: UPath) -> UPath:
    """Prepare the recipe's data under ``folder`` unless that is done, and return its folder.

    Raises:
        DataError: the data cannot be read, or contradicts the recipe.
    """
    location = _location(recipe, folder)
    if not _is_complete(location):
        _publish(prepare(recipe), location)
    return location


def keep_data(data: PreparedData, recipe: Recipe, folder: UPath) -> None:
    """Save prepared data where the recipe's trials look for it."""
    if not _is_complete(location := _location(recipe, folder)):
        _publish(data, location)


def find_data(recipe: Recipe, folder: UPath) -> UPath | None:
    """Return the folder of data that trials of this recipe have prepared; None if they prepared other data."""
    location = _location(recipe, folder)
    return location if _is_complete(location) else None


def _is_complete(location: UPath) -> bool:
    return (location / CHECKSUMS_FILE).exists()


def _publish(data: PreparedData, location: UPath) -> None:
    """Save the data. On a disk this is atomic: of several processes that save the same, the first one wins."""
    if not is_local(location):
        data.save(location)
        return
    temporary = location.with_name(f".{location.name}.{uuid.uuid4().hex[:8]}.tmp")
    data.save(temporary)
    try:
        temporary.rename(location)
    except OSError:
        if not _is_complete(location):
            raise
        shutil.rmtree(temporary.path)


def _location(recipe: Recipe, folder: UPath) -> UPath:
    """Return the folder of the recipe's way to prepare data."""
    # ``model.pretrained`` counts, because its tokenizer or image processor prepares the data.
    return folder / sha256_of(f"{recipe.task} {recipe.model.source} {recipe.data.model_dump_json()}".encode())[:12]


@dataclass
class DataCache:
    """Keeps the data of this process's last trial in memory."""

    folder: UPath
    _location: UPath | None = None
    _data: PreparedData | None = field(default=None, repr=False)

    def get(self, recipe: Recipe) -> PreparedData:
        """Return the recipe's prepared data."""
        location = prepare_data(recipe, self.folder)
        if self._data is None or location != self._location:
            self._data, self._location = load_prepared(recipe, location), location
        return self._data
