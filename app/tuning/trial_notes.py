"""The callback of Ray Tune that notes in each trial's folder what trackers are told of it."""

from collections.abc import Sequence
from typing import Any

from ray import tune
from ray.tune.experiment import Trial
from upath import UPath

from app.best_effort import BestEffort
from app.config import Objective
from app.storage import write_atomically
from app.tracking.tracked_run import TRIAL_FILE, TrialNote
from app.tuning.trial_config import ENDED, NUMBER, VALUES, FinalResult


class TrialNotes(tune.Callback):  # type: ignore[misc] # Ray has no types
    """Writes ``trial.json`` when a trial starts and when it has ended. A trial that is paused goes on running."""

    def __init__(self, trials: UPath, objectives: Sequence[Objective], pauses: bool) -> None:
        """``pauses``: whether a trial that stops early may go on later."""
        self._trials, self._objectives, self._pauses = trials, objectives, pauses
        self._writing = BestEffort(f"{TRIAL_FILE} cannot be written: trackers do not learn of it", "the search")

    def on_trial_start(self, trial: Trial, **_: Any) -> None:
        """Note the values that were drawn for the trial."""
        self._write(trial, TrialNote(values=trial.config[VALUES]))

    def on_trial_complete(self, trial: Trial, **_: Any) -> None:
        """Note that training has ended, or that the scheduler has ended it."""
        if ENDED in trial.last_result:
            final = FinalResult.model_validate(trial.last_result).final_values
            names = [objective.metric for objective in self._objectives]
            objectives = dict(zip(names, final, strict=True))
            self._write(trial, TrialNote(values=trial.config[VALUES], state="complete", objectives=objectives))
        elif not self._pauses:
            self._write(trial, TrialNote(values=trial.config[VALUES], state="pruned"))

    def on_trial_error(self, trial: Trial, **_: Any) -> None:
        """Note a trial's last failure."""
        self._write(trial, TrialNote(values=trial.config[VALUES], state="failed"))

    def _write(self, trial: Trial, note: TrialNote) -> None:
        file = self._trials / f"{trial.config[NUMBER]:04d}" / TRIAL_FILE
        self._writing(lambda: write_atomically(file, note.model_dump_json().encode()))
