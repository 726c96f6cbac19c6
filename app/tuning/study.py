"""The study of a search: Optuna's record of every trial, from which a search that was cut off goes on."""

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from app.config import Recipe, TuneConfig
from app.errors import RecipeError, TuningError
from app.tuning.earlier import learn, load_earlier, load_study
from app.tuning.question import directions_of, note_question, require_objectives, require_same
from app.tuning.samplers import KEEPS_STATE, create_sampler, create_substitute
from app.tuning.space import Space, Value
from app.tuning.storage import StudyPlace, explained, open_storage
from app.tuning.trials import (
    CAUSE,
    DUPLICATE_OF,
    EPOCHS,
    FAILURES,
    INHERITED,
    KEPT,
    RUNG_RESULTS,
    STOPPED_EARLY,
    VALUES,
    WAITS,
    best_trials,
    epochs_of,
    kept_value,
    own_trials,
    rung_results_of,
    waits,
)
from app.tuning.view import ViewCache, view_of

LOG = logging.getLogger(__name__)

_MOST_REPEATS = 20
"""Draws in a row, after which a sampler is taken to have nothing new."""

_SECONDS = "seconds"
"""Noted of the study."""


@dataclass(frozen=True)
class Proposal:
    """A trial that is to be run."""

    number: int
    values: dict[str, Value]
    """Of recipe keys."""


class SearchStudy:
    """Proposes trials, and is told what became of them. Every answer of it is a sentence or in the database."""

    def __init__(self, study: Study, place: StudyPlace, space: Space, config: TuneConfig) -> None:
        self.study, self.place, self.space, self._config = study, place, space, config
        self._open: dict[int, Trial] = {}
        for each in self.trials:
            if each.state == TrialState.RUNNING:
                self._open[each.number] = Trial(study, each._trial_id)
        self._sampler = study.sampler
        if not isinstance(self._sampler, KEEPS_STATE):  # it is shown views, and Optuna's refuse a second study
            study.sampler = RandomSampler(seed=config.seed)  # for what an enqueued trial leaves open
        self._substitute = create_substitute(config, space.is_finite)
        self.rung_results = rung_results_of(study)
        """The first objective of each trial that ended or came to wait, in that order; None if it has no value."""
        self._view_cache: ViewCache = {}
        self.exhausted: str | None = None
        """Why there are fewer trials than were asked for."""
        self._interrupted = [each.number for each in self.trials if each.number in self._open and not waits(each)]

    @classmethod
    def create(
        cls,
        name: str,
        place: StudyPlace,
        space: Space,
        recipe: Recipe,
        config: TuneConfig,
        earlier: Sequence[tuple[str, StudyPlace]] = (),
    ) -> Self:
        """A new study, whose first trial will be the recipe's own values, and the next ones the best of ``earlier``.

        A value of the recipe's that the space cannot draw is named in the log.

        Raises:
            StorageError: the storage cannot be opened.
            TuningError: a study of this name is there already, or an earlier one has other objectives.
        """
        known = [load_earlier(each, where) for each, where in earlier]
        for each in known:
            require_objectives(each, config)
        storage = open_storage(place)
        with explained(place):
            if name in optuna.get_all_study_names(storage):
                raise TuningError(f"study {name!r} is in {place} already: two searches never share one")
            study = optuna.create_study(
                study_name=name,
                storage=storage,
                sampler=create_sampler(config, past=0),
                directions=directions_of(config),
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                study.set_metric_names([each.metric for each in config.objectives])  # for dashboards and plots
            note_question(study, space, recipe, config)
            for key, value in space.values_outside().items():
                LOG.warning("the recipe's own %s=%s is not in tune.space: the first trial draws another", key, value)
            study.enqueue_trial(space.own_values())
            for each in known:
                learn(study, each, space)
        return cls(study, place, space, config)

    @classmethod
    def resume(cls, name: str, place: StudyPlace, space: Space, recipe: Recipe, config: TuneConfig) -> Self:
        """The study of an earlier search, if it asks the same question.

        Raises:
            StorageError: it cannot be opened, or is not there.
            TuningError: its space, objectives or recipe are others, or keys that make its trials comparable.
        """
        study = load_study(name, place)
        with explained(place):
            require_same(study, space, recipe, config)
            study.sampler = create_sampler(config, past=len(study.get_trials(deepcopy=False)))
        return cls(study, place, space, config)

    @property
    def trials(self) -> list[FrozenTrial]:
        """The trials of this search, in order: without those it learned from, and without duplicates."""
        with explained(self.place):
            return own_trials(self.study)

    @property
    def ended(self) -> list[FrozenTrial]:
        """Those of ``trials`` that are not running."""
        return [each for each in self.trials if each.state.is_finished()]

    @property
    def best(self) -> list[FrozenTrial]:
        """The trial that is worth most so far; of several objectives the Pareto front, best first in the first one."""
        with explained(self.place):
            return best_trials(self.study)

    @property
    def epochs_trained(self) -> int:
        """Over all trials of this search."""
        return sum(epochs_of(each) for each in self.trials)

    @property
    def seconds(self) -> float:
        """Spent on this search, without those in which it was stopped, as ``note_seconds`` heard last."""
        return float(self.study.user_attrs.get(_SECONDS, 0.0))

    def ask(self, most: int) -> Proposal | None:
        """The next trial: one that a search before this left running, else a new one; None if there are ``most``.

        It is also None once nothing new can be drawn, as ``exhausted`` then says.
        """
        with explained(self.place):
            while self._interrupted:
                if proposal := self._take_up(self._interrupted.pop(0)):
                    return proposal
            return self._new(most)

    def put_back(self, number: int) -> None:
        """Put back a trial that could not be started. It is proposed again before any new trial."""
        self._interrupted.append(number)

    def go_on(self, number: int) -> Proposal:
        """A waiting trial, which trains on."""
        with explained(self.place):
            trial = self._open[number]
            trial.set_user_attr(WAITS, False)
            return Proposal(number, trial.user_attrs[VALUES])

    def wait(self, number: int) -> None:
        """The trial waits for a promotion: in the study it still runs."""
        with explained(self.place):
            self._open[number].set_user_attr(WAITS, True)
            self._record_rung_result(number, kept_value(self._open[number]))

    def report(self, number: int, epoch: int, value: float | None, cost: float) -> None:
        """The objective after an epoch; of several objectives Optuna keeps none.

        ``cost`` is by what training chooses the epoch whose weights it keeps: the lowest one.
        """
        with explained(self.place):
            trial = self._open[number]
            if value is not None and len(self.study.directions) == 1:
                with warnings.catch_warnings(action="ignore"):  # an epoch that is trained again keeps its first value
                    trial.report(value, epoch)
                kept = trial.user_attrs.get(KEPT)
                if kept is None or cost < kept[0]:
                    trial.set_user_attr(KEPT, [cost, value])
            trial.set_user_attr(EPOCHS, epoch)  # last: an epoch of which only half is known is reported again

    def last_reported_epoch(self, number: int) -> int:
        """Return the last epoch that a running trial reported; 0 if it reported none."""
        with explained(self.place):
            return int(self._open[number].user_attrs.get(EPOCHS, 0))

    def note_seconds(self, seconds: float) -> None:
        """So long the search has taken until now; one that goes on counts from there."""
        with explained(self.place):
            self.study.set_user_attr(_SECONDS, seconds)

    def complete(self, number: int, values: Sequence[float], stopped_early: bool) -> None:
        """The trial trained to its end, or stopped early by itself."""
        with explained(self.place):
            self._open[number].set_user_attr(STOPPED_EARLY, stopped_early)
            self._record_rung_result(number, values[0])
            self._tell(number, TrialState.COMPLETE, list(values))

    def prune(self, number: int, cause: str) -> None:
        """The trial was cut short by somebody else; what it reported stays."""
        with explained(self.place):
            self._open[number].set_user_attr(CAUSE, cause)
            self._record_rung_result(number, kept_value(self._open[number]))
            self._tell(number, TrialState.PRUNED, None)

    def note_failure(self, number: int, cause: str) -> None:
        """The trial failed and is run again."""
        with explained(self.place):
            trial = self._open[number]
            trial.set_user_attr(FAILURES, [*trial.user_attrs.get(FAILURES, []), cause])

    def failures(self, number: int) -> int:
        """How often the trial failed before, in this search or in one that it goes on with."""
        with explained(self.place):
            return len(self._open[number].user_attrs.get(FAILURES, []))

    def fail(self, number: int, cause: str) -> None:
        """The trial failed for good."""
        with explained(self.place):
            self._open[number].set_user_attr(CAUSE, cause)
            self._record_rung_result(number, None)
            self._tell(number, TrialState.FAIL, None)

    def take_over(self, number: int, values: dict[str, Value], epoch: int) -> bool:
        """The trial goes on with other values, from another's checkpoint after ``epoch``: population-based training.

        Return False if the study knows that already.
        """
        with explained(self.place):
            trial = self._open[number]
            known = trial.user_attrs
            if (known.get(VALUES), known.get(EPOCHS, 0)) == (values, epoch):
                return False
            trial.set_user_attr(VALUES, values)
            trial.set_user_attr(KEPT, None)  # nor does it keep its own best epoch any more
            trial.set_user_attr(INHERITED, known.get(INHERITED, 0) + epoch - known.get(EPOCHS, 0))
            trial.set_user_attr(EPOCHS, epoch)
            return True

    def end_running(self, cause: str) -> list[int]:
        """Record every trial that still runs or waits as cut short, and return their numbers."""
        numbers = sorted(self._open)
        for number in numbers:
            self.prune(number, cause)
        return numbers

    def _record_rung_result(self, number: int, value: float | None) -> None:
        """Note in the trial that it ended or waits at a rung. (A database may limit the size of one attribute.)"""
        trial = self._open[number]
        trial.set_user_attr(RUNG_RESULTS, [*trial.user_attrs.get(RUNG_RESULTS, []), [len(self.rung_results), value]])
        self.rung_results.append(value)

    def _new(self, most: int) -> Proposal | None:
        for sampler in (self._sampler, self._substitute):
            for _ in range(_MOST_REPEATS):
                if self.exhausted or len(self.trials) >= most:
                    return None
                trial = self._draw(sampler)
                if trial and (proposal := self._propose(trial)):
                    return proposal
        self.exhausted = (
            f"tune.space {self.space.name!r} has nothing more to try: the last {2 * _MOST_REPEATS} draws repeated "
            "earlier trials, or failed"
        )
        return None

    def _draw(self, sampler: BaseSampler) -> Trial | None:
        """A new trial, which the sampler proposes knowing those that wait as well as those that have ended.

        None if it would repeat another; a sampler that keeps its state in the study has to begin it to know.
        """
        enqueued = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        if enqueued or isinstance(sampler, KEEPS_STATE):
            return self.study.ask()
        drawn = view_of(self.study, sampler, self.space, self._view_cache).ask()
        try:
            values = self.space.draw(drawn)
        except RecipeError:  # the trial fails as this one does, and is filed
            values = drawn.params
        if self._first_with(values):
            return None
        self.study.enqueue_trial(drawn.params)
        return self.study.ask()

    def _take_up(self, number: int) -> Proposal | None:
        """A trial that was left running, with the values that it had."""
        trial = self._open[number]
        return Proposal(number, trial.user_attrs[VALUES]) if VALUES in trial.user_attrs else self._propose(trial)

    def _propose(self, trial: Trial) -> Proposal | None:
        """Draw the trial's values; None if the space fails at it, or if it would repeat another."""
        self._open[trial.number] = trial
        try:
            values = self.space.draw(trial)
        except RecipeError as error:
            LOG.warning("trial %d cannot be drawn: %s", trial.number, error)
            trial.set_user_attr(VALUES, trial.params)
            trial.set_user_attr(CAUSE, str(error))
            self._tell(trial.number, TrialState.FAIL, None)
            return None
        first = self._first_with(values)
        if first is not None:
            self._file_duplicate(trial.number, values, first)
            return None
        trial.set_user_attr(VALUES, values)
        return Proposal(trial.number, values)

    def _first_with(self, values: Mapping[str, Value]) -> FrozenTrial | None:
        """An earlier trial with these values: the same would come out."""
        return next((each for each in self.trials if each.user_attrs.get(VALUES) == values), None)

    def _file_duplicate(self, number: int, values: dict[str, Value], first: FrozenTrial) -> None:
        """Record the trial with the outcome of the one before it, and do not run it."""
        trial = self._open[number]
        trial.set_user_attr(DUPLICATE_OF, first.number)  # before its values: with those it would be taken up and run
        trial.set_user_attr(VALUES, values)
        for epoch, value in first.intermediate_values.items():
            trial.report(value, epoch)
        if first.state in (TrialState.COMPLETE, TrialState.PRUNED):
            self._tell(number, first.state, first.values if first.state == TrialState.COMPLETE else None)
        else:
            self._tell(number, TrialState.FAIL, None)

    def _tell(self, number: int, state: TrialState, values: list[float] | None) -> None:
        self.study.tell(self._open.pop(number), values, state)
