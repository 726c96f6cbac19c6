"""The actor in which Ray Tune runs trials, one after another, so that imports happen once."""

import gc
import math
from functools import partial
from pathlib import Path
from typing import Any

from ray import tune
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed
from upath import UPath

from app.artifacts import CHECKPOINTS, DATA, TRIALS
from app.best_effort import warn
from app.checksums import CHECKSUMS_FILE
from app.config import Recipe
from app.errors import ActorBusyError, TrainingError
from app.storage import to_path, upload
from app.tasks import find_task
from app.training.checkpoints.store import CheckpointStore
from app.training.coordination.shared_folder import require_mark
from app.training.records import Ending, EpochRecord, epoch_cost
from app.training.reporting.recorder import Report
from app.tuning.objectives import epoch_value, final_values
from app.tuning.trial_config import LAST_REPORTED_EPOCH, NUMBER, VALUES, EpochResult, FinalResult, trial_recipe
from app.tuning.trial_data import DataCache
from app.tuning.trial_training import TrialThread, train_here, train_with_workers

_WRITE_TIMEOUT_S = 60.0


class TrialActor(tune.Trainable):  # type: ignore[misc] # Ray has no types
    """Trains the trial that its configuration describes, one epoch per call of ``step``."""

    def setup(self, config: dict[str, Any], recipe: str, run_folder: str, mark: str) -> None:
        """Begin a trial.

        Args:
            config: the keys of ``app.tuning.trial_config``.
            recipe: the search's recipe, as JSON.
            run_folder: the search's folder, in which the search has written ``mark``.
            mark: shows that this node sees the same folder.
        """
        self._recipe = Recipe.model_validate_json(recipe)
        self._folder, self._mark = to_path(run_folder), mark
        self._data = DataCache(self._folder / DATA)
        self._begin(config)

    def __repr__(self) -> str:
        """Return the name in Ray's dashboard and logs."""
        return f"trials of {self._folder.name}"

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Leave this actor's last trial and begin another.

        Raises:
            ActorBusyError: the last trial's checkpoint is still being stored, or its memory cannot be freed. The search
                then starts this trial in another actor.
        """
        if not self._thread.stop():
            raise ActorBusyError(f"{str(self._trial_folder)!r} is still being written")
        if self._has_leaked:
            raise ActorBusyError("ZeRO 3 keeps the last trial's model in memory")
        # With asha, unfinished trials are paused.
        if self._has_ended or self._tune.scheduler != "asha":
            remove_checkpoints(self._trial_folder)
        # The engine and the model reference each other, so only the collector frees them.
        gc.collect()
        # What lives on is imported code. The next collection would spend 0.2 s on it.
        gc.freeze()
        self._begin(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Train the next epoch and return its result.

        The last epoch's result includes the final values. So a search that ends after it still has a complete trial.
        """
        outcome = self._thread.next()
        if isinstance(outcome, EpochRecord) and self._is_last(outcome):
            outcome = self._thread.next()
        if isinstance(outcome, Ending):
            return self._final_result(outcome)
        self._step = outcome.step
        return EpochResult(epoch=outcome.epoch, value=self._value(outcome), cost=self._cost(outcome)).model_dump()

    def cleanup(self) -> None:
        """Stop the trial. Its last checkpoint stays."""
        self._thread.stop()

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copy the newest checkpoint, for this trial in another actor or for other trials of a population."""
        newest = self._newest_checkpoint()
        newest.fs.get(newest.path, str(Path(checkpoint_dir) / newest.name), recursive=True)

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Continue from a copy of a checkpoint of this trial or of another."""
        remove_checkpoints(self._trial_folder)
        (copy,) = Path(checkpoint_dir).glob("step_*")
        target = self._trial_folder / CHECKPOINTS / copy.name
        target.mkdir(parents=True)
        # The checksums come last, because they commit the checkpoint.
        for file in sorted(copy.iterdir(), key=lambda file: file.name == CHECKSUMS_FILE):
            upload(file, target / file.name)

    def _begin(self, config: dict[str, Any]) -> None:
        assert self._recipe.tune is not None
        self._tune = self._recipe.tune
        self._trial_folder = self._folder / TRIALS / f"{config[NUMBER]:04d}"
        self._has_ended = self._has_leaked = False
        self._thread = TrialThread(partial(self._train_trial, config[VALUES], config[LAST_REPORTED_EPOCH]))

    def _train_trial(self, values: dict[str, Any], last_reported_epoch: int, report: Report) -> Ending:
        """Train in the trial's thread, where values that the recipe refuses fail the trial like any other error."""
        require_mark(self._folder, self._mark)
        self._trial = trial_recipe(self._recipe, values, self._tune)
        self._has_leaked = self._trial.train.plan.zero_stage == 3  # github.com/deepspeedai/DeepSpeed/issues/7204
        train = train_here if self._trial.train.workers == 1 else train_with_workers
        return train(self._trial, self._data, self._trial_folder, report, last_reported_epoch)

    def _value(self, record: EpochRecord) -> float | None:
        """Return the first objective, or None if it is only measured at the end."""
        first = self._tune.objectives[0]
        return None if first.is_measured_at_end else epoch_value(record, first)

    def _is_last(self, record: EpochRecord) -> bool:
        """Return whether training ends after the epoch."""
        config = self._trial.train
        return record.stopped_early or record.epoch >= config.epochs or record.step >= (config.max_steps or math.inf)

    def _cost(self, record: EpochRecord) -> tuple[float, float]:
        return epoch_cost(record, find_task(self._trial.task).selection(self._trial.train))

    def _newest_checkpoint(self) -> UPath:
        """Wait for the checkpoint of the last reported epoch, and return the newest one.

        If that checkpoint is not written in time, return an older one. A trial that starts from it repeats an epoch.

        Raises:
            TrainingError: there is no checkpoint.
        """
        store = CheckpointStore(self._trial_folder / CHECKPOINTS)
        retrying = Retrying(
            retry=retry_if_result(lambda newest: newest is None or newest.step < self._step),
            wait=wait_fixed(0.05),
            stop=stop_after_delay(_WRITE_TIMEOUT_S),
            retry_error_callback=lambda state: state.outcome and state.outcome.result(),  # an older one, or None
        )
        newest = retrying(lambda: max(store.committed(), default=None))
        late = f"the checkpoint of step {self._step} was not written in {_WRITE_TIMEOUT_S:g} s"
        if newest is None:
            raise TrainingError(f"{late}, and there is no earlier one").of("checkpoint.not_written")
        if newest.step < self._step:
            warn(f"{late}; other trials continue from step {newest.step}")
        return store.folder_of(newest)

    def _final_result(self, ending: Ending) -> dict[str, Any]:
        if ending.stop_request:
            # A failure is retried, from the last checkpoint.
            raise TrainingError("the trial was asked to stop").of("trial.stopped")
        self._has_ended = True
        last = ending.records[-1]
        values = final_values(self._tune.objectives, ending.records, self._trial, self._data.get(self._trial))
        return FinalResult(
            epoch=last.epoch,
            value=self._value(last),
            cost=self._cost(last),
            final_values=values,
            stopped_early=last.stopped_early,
        ).model_dump()


def remove_checkpoints(trial_folder: UPath) -> None:
    """Remove the checkpoints of a trial that has ended. ``best.yaml`` is trained from the start."""
    checkpoints = trial_folder / CHECKPOINTS
    if checkpoints.exists():
        checkpoints.fs.rm(checkpoints.path, recursive=True)
