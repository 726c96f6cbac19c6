"""The study of a search: Optuna's record of every trial, from which an interrupted search resumes."""

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from app.config import Recipe, TuneConfig
from app.errors import RecipeError, TuningError
from app.tuning.optuna_internals import reopen_trial
from app.tuning.samplers import TrialSampler, create_sampler
from app.tuning.space import Space, Value
from app.tuning.storage import StudyLocation, explained, load_study, open_storage
from app.tuning.study_fingerprint import (
    directions_of,
    record_fingerprint,
    require_same_fingerprint,
    require_same_objectives,
    with_recorded_versions,
)
from app.tuning.trials import (
    CAUSE,
    DUPLICATE_OF,
    EPOCHS,
    FAILURES,
    INHERITED,
    KEPT,
    PAUSED,
    RUNG_RESULTS,
    STOPPED_EARLY,
    VALUES,
    best_trials,
    epochs_of,
    is_paused,
    kept_value,
    load_earlier,
    own_trials,
    rung_results_of,
    warm_start,
)

LOG = logging.getLogger(__name__)

_MAX_REPEATS = 20
"""Number of repeated draws in a row after which a sampler counts as having nothing new."""

_SECONDS = "seconds"
"""Attribute of the study: how long its searches took."""


@dataclass(frozen=True)
class Proposal:
    """A trial to run."""

    number: int
    values: dict[str, Value]
    """The values of recipe keys."""


class SearchStudy:
    """Proposes trials and records their outcomes. Each method writes to the database or raises StorageError."""

    def __init__(self, study: Study, location: StudyLocation, space: Space, config: TuneConfig) -> None:
        self.study, self.location, self.space = study, location, space
        self._open: dict[int, Trial] = {}
        for trial in self.trials:
            if trial.state == TrialState.RUNNING:
                self._open[trial.number] = reopen_trial(study, trial)
        self._sampler = TrialSampler(study, space, config)
        self.rung_results = rung_results_of(study)
        """The first objective of each trial that ended or was paused, in that order; None if it has no value."""
        self.exhausted: str | None = None
        """Why there are fewer trials than the recipe says; None while the space has more."""
        # A paused trial waits for its promotion. The others ran when the search was interrupted.
        self._interrupted = [
            trial.number for trial in self.trials if trial.number in self._open and not is_paused(trial)
        ]

    @classmethod
    def create(
        cls,
        name: str,
        location: StudyLocation,
        space: Space,
        recipe: Recipe,
        config: TuneConfig,
        earlier: Sequence[tuple[str, StudyLocation]] = (),
    ) -> Self:
        """Create a study. Its first trial has the recipe's own values, the next ones the best values of ``earlier``.

        Log each of the recipe's values that the space cannot draw.

        Raises:
            StorageError: the storage cannot be opened.
            TuningError: the study exists already, or an earlier one has other objectives.
        """
        # First, so that an earlier study that cannot be read leaves no new one behind.
        earlier_studies = [load_earlier(earlier_name, where) for earlier_name, where in earlier]
        for earlier_study in earlier_studies:
            require_same_objectives(earlier_study, config)
        storage = open_storage(location)
        with explained(location):
            if name in optuna.get_all_study_names(storage):
                raise TuningError(f"study {name!r} exists in {location} already: two searches cannot share a study").of(
                    "study.taken"
                )
            study = optuna.create_study(
                study_name=name,
                storage=storage,
                sampler=create_sampler(config, past=0),
                directions=directions_of(config),
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                study.set_metric_names([objective.metric for objective in config.objectives])  # for plots
            record_fingerprint(study, space, recipe, config)
            for key, value in space.values_outside().items():
                LOG.warning("the recipe's own %s=%s is not in tune.space: the first trial draws another", key, value)
            study.enqueue_trial(space.own_values())
            for earlier_study in earlier_studies:
                warm_start(study, earlier_study, space)
        return cls(study, location, space, config)

    @classmethod
    def resume(cls, name: str, location: StudyLocation, space: Space, recipe: Recipe, config: TuneConfig) -> Self:
        """Load the study of an interrupted search.

        Raises:
            StorageError: the study cannot be opened, or does not exist.
            TuningError: its fingerprint differs, so its trials cannot be compared with new ones.
        """
        study = load_study(name, location)
        with explained(location):
            require_same_fingerprint(study, space, recipe, config)
            study.sampler = create_sampler(config, past=len(study.get_trials(deepcopy=False)))
            space = with_recorded_versions(space, study)
        return cls(study, location, space, config)

    @property
    def trials(self) -> list[FrozenTrial]:
        """The trials of this search, in order, without duplicates and without trials of earlier studies."""
        with explained(self.location):
            return own_trials(self.study)

    @property
    def ended(self) -> list[FrozenTrial]:
        """The trials of this search that have ended."""
        return [trial for trial in self.trials if trial.state.is_finished()]

    @property
    def best(self) -> list[FrozenTrial]:
        """The best trial so far, or with several objectives the Pareto front, best in the first one first."""
        with explained(self.location):
            return best_trials(self.study)

    @property
    def epochs_trained(self) -> int:
        """The number of epochs that all trials of this search have trained."""
        return sum(epochs_of(trial) for trial in self.trials)

    @property
    def seconds(self) -> float:
        """How long this search has run, as ``record_seconds`` last stored it. Interruptions do not count."""
        return float(self.study.user_attrs.get(_SECONDS, 0.0))

    def ask(self, max_trials: int) -> Proposal | None:
        """Return the next trial: an interrupted one, else a new one.

        Return None if there are ``max_trials``, or if nothing new can be drawn. ``exhausted`` then says why.
        """
        with explained(self.location):
            while self._interrupted:
                if proposal := self._take_up(self._interrupted.pop(0)):
                    return proposal
            return self._new(max_trials)

    def put_back(self, number: int) -> None:
        """Put back a trial that could not be started. It is proposed again before any new trial."""
        self._interrupted.append(number)

    def unpause(self, number: int) -> Proposal:
        """Return a promoted trial, to be run again."""
        with explained(self.location):
            trial = self._open[number]
            trial.set_user_attr(PAUSED, False)
            return Proposal(number, trial.user_attrs[VALUES])

    def pause(self, number: int) -> None:
        """Record that the trial is paused until it is promoted. To Optuna it is still running."""
        with explained(self.location):
            self._open[number].set_user_attr(PAUSED, True)
            self._record_rung_result(number, kept_value(self._open[number]))

    def report(self, number: int, epoch: int, value: float | None, cost: tuple[float, float]) -> None:
        """Record an epoch's objective. With several objectives, Optuna stores no values of epochs.

        Training keeps the weights of the epoch with the lowest ``cost``.
        """
        with explained(self.location):
            trial = self._open[number]
            if value is not None and len(self.study.directions) == 1:
                # A repeated epoch keeps its first value.
                with warnings.catch_warnings(action="ignore"):
                    trial.report(value, epoch)
                kept = trial.user_attrs.get(KEPT)
                if math.isfinite(value) and (kept is None or cost < tuple(kept[0])):
                    trial.set_user_attr(KEPT, [cost, value])
            # This comes last, so that an epoch that is only half recorded is reported again.
            trial.set_user_attr(EPOCHS, epoch)

    def last_reported_epoch(self, number: int) -> int:
        """Return the last epoch that a running trial reported; 0 if it reported none."""
        with explained(self.location):
            return int(self._open[number].user_attrs.get(EPOCHS, 0))

    def record_seconds(self, seconds: float) -> None:
        """Record how long the search has run. A resumed search counts from there."""
        with explained(self.location):
            self.study.set_user_attr(_SECONDS, seconds)

    def complete(self, number: int, values: Sequence[float], stopped_early: bool) -> None:
        """Record a trial that trained to its end, or that early stopping ended.

        If a trial continued from another trial's checkpoint, its value is that of its own epochs since then, because
        ``values`` may be those of the other trial. If it has no such value, it is pruned.
        """
        with explained(self.location):
            inherits, own = INHERITED in self._open[number].user_attrs, kept_value(self._open[number])
        if inherits:
            if own is None:
                self.prune(number, "no epoch has a value since the trial took over another trial's weights")
                return
            values = [own]
        with explained(self.location):
            self._open[number].set_user_attr(STOPPED_EARLY, stopped_early)
            self._record_rung_result(number, values[0])
            # The state is written last, so that a resumed search takes up a trial that is only half recorded.
            self._tell(number, TrialState.COMPLETE, list(values))

    def prune(self, number: int, cause: str) -> None:
        """Record a trial that the scheduler or the search ended. Its reported epochs stay."""
        with explained(self.location):
            self._open[number].set_user_attr(CAUSE, cause)
            self._record_rung_result(number, kept_value(self._open[number]))
            self._tell(number, TrialState.PRUNED, None)

    def record_failure(self, number: int, cause: str) -> None:
        """Record a failure after which the trial is run again."""
        with explained(self.location):
            trial = self._open[number]
            trial.set_user_attr(FAILURES, [*trial.user_attrs.get(FAILURES, []), cause])

    def num_failures(self, number: int) -> int:
        """Return how often the trial has failed, including before a resume."""
        with explained(self.location):
            return len(self._open[number].user_attrs.get(FAILURES, []))

    def fail(self, number: int, cause: str) -> None:
        """Record a trial's last failure."""
        with explained(self.location):
            self._open[number].set_user_attr(CAUSE, cause)
            self._record_rung_result(number, None)
            self._tell(number, TrialState.FAIL, None)

    def record_clone(self, number: int, values: dict[str, Value], epoch: int) -> bool:
        """Record that a trial of a population continues with other values, from another's checkpoint after ``epoch``.

        Return False if that is recorded already.
        """
        with explained(self.location):
            trial = self._open[number]
            known = trial.user_attrs
            if (known.get(VALUES), known.get(EPOCHS, 0)) == (values, epoch):
                return False
            trial.set_user_attr(VALUES, values)
            # The trial's own best epoch was of the weights that it gave up.
            trial.set_user_attr(KEPT, None)
            trial.set_user_attr(INHERITED, known.get(INHERITED, 0) + epoch - known.get(EPOCHS, 0))
            trial.set_user_attr(EPOCHS, epoch)
            return True

    @property
    def open_trials(self) -> list[int]:
        """The numbers of the trials that run or are paused."""
        return sorted(self._open)

    def _record_rung_result(self, number: int, value: float | None) -> None:
        """Record in the trial that it ended or was paused. A list in the study would outgrow MySQL's attributes."""
        trial = self._open[number]
        trial.set_user_attr(RUNG_RESULTS, [*trial.user_attrs.get(RUNG_RESULTS, []), [len(self.rung_results), value]])
        self.rung_results.append(value)

    def _new(self, max_trials: int) -> Proposal | None:
        for sampler in self._sampler.samplers:
            for _ in range(_MAX_REPEATS):
                if self.exhausted or len(self.trials) >= max_trials:
                    return None
                trial = self._sampler.draw(sampler, lambda values: self._first_with(values) is not None)
                if trial and (proposal := self._propose(trial)):
                    return proposal
        self.exhausted = (
            f"tune.space {self.space.name!r} has nothing more to try: the last {2 * _MAX_REPEATS} draws repeated "
            "earlier trials, or failed"
        )
        return None

    def _take_up(self, number: int) -> Proposal | None:
        """Return an interrupted trial with its values."""
        trial = self._open[number]
        return Proposal(number, trial.user_attrs[VALUES]) if VALUES in trial.user_attrs else self._propose(trial)

    def _propose(self, trial: Trial) -> Proposal | None:
        """Draw the trial's values. Return None if the space fails, or if the trial repeats another."""
        self._open[trial.number] = trial
        try:
            values = self.space.draw(trial)
        except RecipeError as error:
            LOG.warning("trial %d cannot be drawn: %s", trial.number, error)
            # With its values recorded, the trial is not drawn again.
            trial.set_user_attr(VALUES, trial.params)
            trial.set_user_attr(CAUSE, str(error))
            self._tell(trial.number, TrialState.FAIL, None)
            return None
        first = self._first_with(values)
        if first is not None:
            self._record_duplicate(trial.number, values, first)
            return None
        trial.set_user_attr(VALUES, values)
        return Proposal(trial.number, values)

    def _first_with(self, values: Mapping[str, Value]) -> FrozenTrial | None:
        """Return the first trial with these values. Training is deterministic, so they are never trained twice."""
        return next((trial for trial in self.trials if trial.user_attrs.get(VALUES) == values), None)

    def _record_duplicate(self, number: int, values: dict[str, Value], first: FrozenTrial) -> None:
        """Record the trial with the outcome of the first one, without running it."""
        trial = self._open[number]
        # This comes first, because a resumed search would run a trial with values.
        trial.set_user_attr(DUPLICATE_OF, first.number)
        trial.set_user_attr(VALUES, values)
        for epoch, value in first.intermediate_values.items():
            trial.report(value, epoch)
        if first.state in (TrialState.COMPLETE, TrialState.PRUNED):
            self._tell(number, first.state, first.values if first.state == TrialState.COMPLETE else None)
        else:
            self._tell(number, TrialState.FAIL, None)

    def _tell(self, number: int, state: TrialState, values: list[float] | None) -> None:
        self.study.tell(self._open.pop(number), values, state)
