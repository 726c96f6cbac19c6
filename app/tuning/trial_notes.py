"""The callback of Ray Tune that notes in each trial's folder what trackers are told of it."""

from collections.abc import Sequence
from typing import Any

from optuna.trial import TrialState
from ray import tune
from ray.tune.experiment import Trial
from upath import UPath

from app.best_effort import BestEffort
from app.config import Objective
from app.storage import write_atomically
from app.tracking.tracked_run import TRIAL_FILE, TrialNote
from app.tuning.study import SearchStudy
from app.tuning.trial_config import NUMBER, VALUES
from app.tuning.trials import ENDINGS


class TrialNotes(tune.Callback):  # type: ignore[misc] # Ray has no types
    """Writes ``trial.json`` when a trial starts and when it has ended. A trial that is paused goes on running."""

    def __init__(self, trials: UPath, study: SearchStudy, objectives: Sequence[Objective]) -> None:
        self._trials, self._study, self._objectives = trials, study, objectives
        self._writing = BestEffort(f"{TRIAL_FILE} cannot be written: trackers do not learn of it", "the search")

    def __getstate__(self) -> dict[str, Any]:
        """Return an empty state, because Ray Tune stores it but does not read it."""
        return {}

    def on_trial_start(self, trial: Trial, **_: Any) -> None:
        """Note the values that were drawn for the trial."""
        self._writing(lambda: self._write(trial, TrialNote(values=trial.config[VALUES])))

    def on_trial_complete(self, trial: Trial, **_: Any) -> None:
        """Note how the trial ended, if it has, as the study's callback recorded it."""
        self._writing(lambda: self._note_end(trial))

    on_trial_error = on_trial_complete

    def _note_end(self, trial: Trial) -> None:
        recorded = self._study.study.get_trials(deepcopy=False)[trial.config[NUMBER]]
        if not recorded.state.is_finished():
            return
        # Optuna gives a pruned trial the value of its last epoch.
        values = recorded.values if recorded.state == TrialState.COMPLETE else []
        objectives = {objective.metric: value for objective, value in zip(self._objectives, values, strict=False)}
        self._write(trial, TrialNote(values=trial.config[VALUES], state=ENDINGS[recorded.state], objectives=objectives))

    def _write(self, trial: Trial, note: TrialNote) -> None:
        file = self._trials / f"{trial.config[NUMBER]:04d}" / TRIAL_FILE
        write_atomically(file, note.model_dump_json().encode())
