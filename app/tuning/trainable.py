"""A trial as Ray Tune runs it: an actor that trains one trial after another and imports everything once."""

import gc
import time
from functools import partial
from pathlib import Path
from typing import Any

from ray import tune
from upath import UPath

from app.checksums import CHECKSUMS_FILE
from app.config import Recipe
from app.errors import ActorBusyError, TrainingError
from app.storage import to_path, upload
from app.training.checkpoints.store import CheckpointStore
from app.training.coordination.shared_folder import require_mark
from app.training.records import Ending, EpochRecord
from app.training.reporting.recorder import Report
from app.training.run_folder import CHECKPOINTS
from app.tuning.attempt import Attempt
from app.tuning.objectives import final_values, objective_of
from app.tuning.results import LAST_REPORTED_EPOCH, NUMBER, VALUES, EpochResult, FinalResult
from app.tuning.trial_data import DataCache
from app.tuning.trial_recipe import trial_recipe
from app.tuning.trial_training import train_here, train_with_workers
from app.warnings import warn

TRIALS, DATA = "trials", "data"
"""In the run's folder: one folder for each trial, and the data that they read."""

_WRITE_TIMEOUT_S = 60.0


class TrialActor(tune.Trainable):  # type: ignore[misc] # Ray has no types
    """Trains the trial that its configuration describes, one epoch for each call of ``step``."""

    def setup(self, config: dict[str, Any], recipe: str, run_folder: str, mark: str) -> None:
        """Begin a trial. ``recipe`` is JSON, ``run_folder`` the search's folder; the search wrote ``mark`` into it."""
        self._recipe = Recipe.model_validate_json(recipe)
        self._folder, self._mark = to_path(run_folder), mark
        self._data = DataCache(self._folder / DATA)
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Leave this actor's last trial and begin another.

        Raises:
            ActorBusyError: the last trial's checkpoint is still being stored, or its memory cannot be freed. The ledger
                then starts this trial in another actor.
        """
        if not self._attempt.cut():
            raise ActorBusyError(f"{str(self._trial_folder)!r} is still being written")
        if self._has_leaked:
            raise ActorBusyError("ZeRO 3 keeps the last trial's model in memory")
        if self._has_ended or self._tune.scheduler != "asha":  # there, the others wait for a promotion
            remove_checkpoints(self._trial_folder)
        gc.collect()  # the engine and the model form a reference cycle
        self._begin(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """The next epoch; with the last one, what the trial came to, so that no end of the search comes between."""
        said = self._attempt.next()
        if isinstance(said, EpochRecord) and said.epoch >= self._trial.train.epochs:
            said = self._attempt.next()
        if isinstance(said, Ending):
            return self._final(said)
        self._step = said.step
        return EpochResult(epoch=said.epoch, value=self._value(said), cost=self._cost(said)).model_dump()

    def cleanup(self) -> None:
        """Leave the trial where it stands."""
        self._attempt.cut()

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copy the newest checkpoint, for a trial that goes on elsewhere or that others go on from."""
        newest = self._newest_checkpoint()
        newest.fs.get(newest.path, str(Path(checkpoint_dir) / newest.name), recursive=True)

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Go on from a copy of a checkpoint, whichever trial's it was."""
        remove_checkpoints(self._trial_folder)
        (copy,) = Path(checkpoint_dir).glob("step_*")
        target = self._trial_folder / CHECKPOINTS / copy.name
        target.mkdir(parents=True)
        for file in sorted(copy.iterdir(), key=lambda file: file.name == CHECKSUMS_FILE):  # checksums last, to commit
            upload(file, target / file.name)

    def _begin(self, config: dict[str, Any]) -> None:
        assert self._recipe.tune is not None
        self._tune = self._recipe.tune
        self._trial_folder = self._folder / TRIALS / f"{config[NUMBER]:04d}"
        self._has_ended = self._has_leaked = False
        self._attempt = Attempt(partial(self._train_trial, config[VALUES], config[LAST_REPORTED_EPOCH]))

    def _train_trial(self, values: dict[str, Any], last_reported_epoch: int, report: Report) -> Ending:
        """As part of the attempt, so that values that the recipe refuses are a failure of the trial like any other."""
        require_mark(self._folder, self._mark)
        self._trial = trial_recipe(self._recipe, values, self._tune)
        self._has_leaked = self._trial.train.plan.zero_stage == 3  # github.com/deepspeedai/DeepSpeed/issues/7204
        train = train_here if self._trial.train.workers == 1 else train_with_workers
        return train(self._trial, self._data, self._trial_folder, report, last_reported_epoch)

    def _value(self, record: EpochRecord) -> float | None:
        """The first objective, unless it is measured at the end alone."""
        first = self._tune.objectives[0]
        return objective_of(record, first) if hasattr(record, first.metric) else None

    def _cost(self, record: EpochRecord) -> float:
        selection = self._trial.train.selection
        return selection.cost(getattr(record, selection.metric))

    def _newest_checkpoint(self) -> UPath:
        """Wait for the checkpoint of the last reported epoch, and return the newest one.

        If that checkpoint is not written in time, return an older one. A trial that starts from it repeats an epoch.

        Raises:
            TrainingError: there is no checkpoint.
        """
        store = CheckpointStore(self._trial_folder / CHECKPOINTS)
        deadline = time.monotonic() + _WRITE_TIMEOUT_S
        while True:
            newest = max(store.committed(), default=None)
            if newest is not None and newest.step >= self._step:
                return store.folder_of(newest)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        late = f"the checkpoint of step {self._step} was not written in {_WRITE_TIMEOUT_S:g} s"
        if newest is None:
            raise TrainingError(f"{late}, and there is no earlier one")
        warn(f"{late}; other trials continue from step {newest.step}")
        return store.folder_of(newest)

    def _final(self, ending: Ending) -> dict[str, Any]:
        if ending.request:
            raise TrainingError("the trial was asked to stop")  # it is retried, from the state that it kept
        self._has_ended = True
        last = ending.records[-1]
        values = final_values(self._tune.objectives, ending.records, self._trial, self._data.get(self._trial))
        return FinalResult(
            epoch=last.epoch,
            value=self._value(last),
            cost=self._cost(last),
            final_values=values,
            stopped_early=last.epoch < self._trial.train.epochs and self._trial.train.max_steps is None,
        ).model_dump()


def remove_checkpoints(trial_folder: UPath) -> None:
    """Of a trial that is over: its best values are trained anew."""
    checkpoints = trial_folder / CHECKPOINTS
    if checkpoints.exists():
        checkpoints.fs.rm(checkpoints.path, recursive=True)
