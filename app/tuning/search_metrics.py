"""How far a search has come, as metrics of its job."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from optuna.trial import TrialState
from ray import tune

from app.best_effort import BestEffort
from app.config import Objective
from app.telemetry import catalog
from app.telemetry.metrics import Publish, Sample
from app.tuning.study import SearchStudy
from app.tuning.trials import ENDINGS, objective_values

_INTERVAL_S = 2.0
_STATES = {TrialState.RUNNING: "running", TrialState.WAITING: "waiting", **ENDINGS}


class SearchMetrics(tune.Callback):  # type: ignore[misc] # Ray has no types
    """Publishes what the study knows, at most every two seconds: reading it takes time for each of its trials."""

    def __init__(self, publish: Publish, study: SearchStudy, recipe_name: str, objectives: Sequence[Objective]) -> None:
        self._publish, self._study, self._objectives = publish, study, objectives
        self._labels = study.study.study_name, recipe_name
        self._published_s = -_INTERVAL_S
        self._publishing = BestEffort("metrics cannot be published", "the search")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for Ray Tune, which only stores it."""
        return {}

    def on_trial_start(self, *_: Any, **__: Any) -> None:
        """Update after the study's callback has recorded the event."""
        self.update()

    on_trial_result = on_trial_complete = on_trial_error = on_trial_start

    def update(self, at_once: bool = False) -> None:
        """Publish, unless that was done just now. ``at_once`` does it anyway."""
        if at_once or time.monotonic() - self._published_s >= _INTERVAL_S:
            self._published_s = time.monotonic()
            self._publishing(lambda: self._publish(list(self._samples())))

    def _samples(self) -> Iterator[Sample]:
        study = self._study
        states = Counter(trial.state for trial in study.trials)
        for state, name in _STATES.items():
            yield catalog.TUNE_TRIALS.of(states[state], *self._labels, name)
        yield catalog.TUNE_EPOCHS.of(study.epochs_trained, *self._labels)
        # With several objectives this is the trial that the RESULT names, too.
        for best in study.best[:1]:
            for objective, value in zip(self._objectives, objective_values(best), strict=False):
                yield catalog.TUNE_BEST_VALUE.of(value, *self._labels, objective.metric)
