"""Run a search on the Ray cluster that this process has joined."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import ray
from ray import tune
from ray.tune.error import TuneError
from ray.tune.schedulers import TrialScheduler
from ray.util import metrics as ray_metrics
from upath import UPath

from app.amounts import count_in
from app.artifacts import TRIALS
from app.config import Placement, Recipe, TrainConfig, TuneConfig
from app.errors import RayloomError, TuningError
from app.telemetry.metrics import Publish, publishing
from app.training.coordination.shared_folder import marked
from app.training.ray_worker import resources_of
from app.tuning.budget import SearchBudget
from app.tuning.promotion import Promotion
from app.tuning.schedulers import create_promotion, create_scheduler, replay
from app.tuning.search_metrics import SearchMetrics
from app.tuning.searcher import StudySearcher
from app.tuning.space import PLAN
from app.tuning.study import SearchStudy
from app.tuning.study_callback import StudyCallback
from app.tuning.table import Table
from app.tuning.trial_actor import TrialActor, remove_checkpoints
from app.tuning.trial_config import trial_recipe
from app.tuning.trial_notes import TrialNotes
from app.tuning.trials import VALUES

_MIN_RESOURCES = {"memory": 1.0}
"""One byte: Ray Tune's actors must reserve something."""

_MIN_PENDING = 4
"""Minimum number of trials that wait for nodes on a cluster that grows, so that it starts several nodes at once."""

_CHECKPOINTS_TO_KEEP = 3
"""Per trial of a population: the newest one, and older ones that another trial may still be reading."""

_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # each trial writes its own metrics
    # Results come one by one, because the scheduler decides after each epoch.
    "TUNE_RESULT_BUFFER_LENGTH": "1",
    # Relative paths of a recipe are meant from the job's folder.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # Ray Tune's own state is never read, because the study has everything.
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
}


@dataclass(frozen=True)
class Search:
    """A search, ready to run."""

    recipe: Recipe
    config: TuneConfig
    study: SearchStudy
    folder: UPath
    """The run's folder."""
    budget: SearchBudget
    cluster_grows: bool = False
    """Whether the cluster may get more nodes while the search runs."""

    @property
    def resources(self) -> dict[str, float]:
        """The resources of the cluster that one trial reserves."""
        return resources_of(self._train, self._workers)

    @property
    def _train(self) -> TrainConfig:
        return trial_recipe(self.recipe, {}, self.config).train

    @property
    def _workers(self) -> int:
        return self._train.workers_range[1]

    @property
    def _actor_resources(self) -> tune.PlacementGroupFactory:
        """The resources of a trial's actor. It trains itself, or leads workers that Ray Train starts beside it."""
        placement = self._train.placement if self._workers == 1 else Placement(_MIN_RESOURCES)
        return tune.PlacementGroupFactory([dict(placement.resources)], bundle_label_selector=[dict(placement.labels)])

    @property
    def reuses_actors(self) -> bool:
        """Whether an actor runs several trials in turn. Not with workers of its own, or ZeRO 3, which leaks memory."""
        space, stage = self.study.space, self._train.plan.zero_stage
        may_split = PLAN in space.distributions or space.may_give("train.plan.zero_stage", 3)
        return self._workers == 1 and stage != 3 and not may_split

    @property
    def max_concurrency(self) -> int:
        """The maximum number of concurrent trials, on a cluster of any size."""
        return min(self.config.concurrent or self.config.trials, self.config.trials)

    def capacity(self) -> int:
        """Return how many trials the cluster has room for now, or fewer if the recipe says so."""
        nodes = [node["Resources"] for node in ray.nodes() if self._train.placement.selects(node)]
        held = {name: sum(node.get(name, 0.0) for node in nodes) for name in self.resources}
        capacity = min(count_in(held[name], amount) for name, amount in self.resources.items())
        return min(capacity, self.max_concurrency)

    def concurrency(self) -> int:
        """Return how many trials should run or wait for nodes now. Only a cluster that grows has waiting ones.

        Waiting trials make the cluster grow. Their values are drawn before the running trials end, so as few as
        possible wait: as many as run, but at least ``_MIN_PENDING``.
        """
        capacity = self.capacity()
        pending = max(capacity, _MIN_PENDING) if self.cluster_grows else 0
        return max(1, min(capacity + pending, self.max_concurrency))

    def run(self, back_up: Callable[[], object]) -> None:
        """Run trials until the search ends. Their outcomes are in the study.

        ``back_up`` stores a copy of the study that survives the loss of this machine.

        Raises:
            StorageError: the study cannot be written; what was written before stays.
            UnsharedStorageError: a trial's node cannot see the search's folder.
            TuningError: Ray Tune cannot go on.
        """
        with marked(self.folder) as mark, publishing(ray_metrics, "the search") as publish:
            self._run(mark, back_up, publish)

    def _run(self, mark: str, back_up: Callable[[], object], publish: Publish) -> None:
        os.environ.update(_ENVIRONMENT)
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # the callback reports failures
        remove_lost_trials(self.study, self.folder / TRIALS)
        config, study = self.config, self.study
        promotion = create_promotion(config, self._train.epochs, study.trials)
        scheduler = create_scheduler(config, self._train.epochs, study.space, promotion)
        # Before the first new result, so that the scheduler compares it with the old trials.
        replay(scheduler, study.ended)

        table = self._table()
        callback = StudyCallback(study, config, self.folder / TRIALS, self.budget, table, promotion, back_up)
        metrics = SearchMetrics(publish, study, self.recipe.name, config.objectives)
        tuner = self._tuner(mark, scheduler, promotion, [callback, metrics, *self._notes()])
        try:
            tuner.fit()
        except TuneError as error:
            raise self._explain(error) from error
        # A resumed search reads the study alone.
        if self._ray_files.exists():
            self._ray_files.fs.rm(self._ray_files.path, recursive=True)

        # The study could not be written. It stays as it is, and the search can be resumed.
        if callback.broken:
            raise callback.broken
        self._prune_open(table)
        metrics.update(at_once=True)
        # A trial that has ended never resumes. A stopped search still needs the checkpoints of the others.
        for trial in study.ended:
            remove_checkpoints(self.folder / TRIALS / f"{trial.number:04d}")

    def _tuner(
        self, mark: str, scheduler: TrialScheduler, promotion: Promotion | None, callbacks: list[tune.Callback]
    ) -> tune.Tuner:
        """Return Ray's tuner of the trials that are left."""
        parameters = {"recipe": self.recipe.model_dump_json(), "run_folder": str(self.folder), "mark": mark}
        trainable = tune.with_resources(tune.with_parameters(TrialActor, **parameters), self._actor_resources)
        trainable.__qualname__ = TrialActor.__qualname__  # the name in Ray's list of actors
        return tune.Tuner(
            trainable,
            tune_config=tune.TuneConfig(
                # The searcher says when there are enough trials.
                num_samples=-1,
                search_alg=StudySearcher(self.study, self.config.trials, promotion, self.concurrency),
                scheduler=scheduler,
                # Without it, Ray Tune runs one trial at a time.
                max_concurrent_trials=self.max_concurrency,
                reuse_actors=self.reuses_actors,
            ),
            run_config=tune.RunConfig(
                name="tune",
                storage_path=str(self._ray_files),
                callbacks=callbacks,
                stop=self.budget,
                # ``StudyCallback`` sets each trial's own limit.
                failure_config=tune.FailureConfig(max_failures=self.config.retries),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False, num_to_keep=_CHECKPOINTS_TO_KEEP),
                verbose=0,
            ),
        )

    @property
    def _ray_files(self) -> UPath:
        return self.folder / "ray"

    def _prune_open(self, table: Table) -> None:
        """Record the trials that are left as pruned."""
        # A search that was asked to stop resumes later, so its trials stay open.
        if not self.budget.stop_requested:
            for number in self.study.open_trials:
                self.study.prune(number, self.budget.reason or "not promoted")
                table.ended(self.study, number)

    def _notes(self) -> list[TrialNotes]:
        """Return what tells trackers of trials, if there are any."""
        if not self.recipe.tracking.trackers:
            return []
        return [TrialNotes(self.folder / TRIALS, self.study, self.config.objectives)]

    def _table(self) -> Table:
        table = Table(self.config.objectives, self._train.epochs, self.config.trials)
        best = {trial.number for trial in self.study.best}
        for trial in self.study.ended:
            table.show(trial, trial.number in best)
        return table

    def _explain(self, error: TuneError) -> RayloomError:
        """Return our own error if Ray Tune wraps one, else a TuningError with Ray Tune's last line."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, RayloomError):
                return cause
            cause = cause.__cause__ or cause.__context__
        return TuningError(f"Ray Tune stopped: {str(error).strip().splitlines()[-1]}").of("search.stopped")


def remove_lost_trials(study: SearchStudy, folder: UPath) -> None:
    """Remove the folders of trials that the study does not know, because it will reuse their numbers.

    These trials began after the copy from which the search resumes was made.
    """
    known = {f"{trial.number:04d}" for trial in study.trials if VALUES in trial.user_attrs}
    for lost in folder.iterdir() if folder.exists() else ():
        if lost.name not in known:
            print(f"trial {lost.name} began after the last copy of the study: its training is lost", flush=True)
            lost.fs.rm(lost.path, recursive=True)
