"""The study as a sampler should see it."""

from typing import Self, cast

import optuna
from optuna.samplers import BaseSampler, BruteForceSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from app.tuning.space import Space, Value
from app.tuning.trials import DUPLICATE_OF, LEARNED_FROM, values_of, waits


class _ViewedTrial(FrozenTrial):
    """A trial in a view. Its copies are shallow: deep copies of 3,000 trials took a second."""

    def __deepcopy__(self, _: object) -> Self:
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        return copy


ViewCache = dict[int, _ViewedTrial]
"""Trials that have ended, as views show them, by number. They do not change any more."""


def view_of(study: Study, sampler: BaseSampler, space: Space, cache: ViewCache) -> Study:
    """Return the study as a sampler should see it; pass the same ``cache`` for each view.

    Trials that wait count as pruned, for a running trial teaches nothing; a trial that failed counts as worse than all,
    for a sampler that never hears of it proposes it again. Duplicates are left out: one of a running trial is filed as
    failed, and the trial may be the best of all. A grid is not shown those that were learned from: they may lack keys.
    """
    left_out = {DUPLICATE_OF, LEARNED_FROM} if isinstance(sampler, BruteForceSampler) else {DUPLICATE_OF}
    view = optuna.create_study(sampler=sampler, directions=study.directions)
    for trial in study.get_trials(deepcopy=False):
        if trial.state == TrialState.WAITING or left_out & trial.user_attrs.keys():
            continue
        viewed = cache.get(trial.number) or _viewed(trial, space)
        if trial.state.is_finished():
            cache[trial.number] = viewed
        view.add_trial(viewed)
    return view


def _viewed(trial: FrozenTrial, space: Space) -> _ViewedTrial:
    params, known = values_at_last(trial, space), {**space.distributions, **trial.distributions}
    viewed = create_trial(
        state=TrialState.PRUNED if waits(trial) or trial.state == TrialState.FAIL else trial.state,
        values=trial.values,
        params=params,
        distributions={key: known[key] for key in params},
        intermediate_values={} if trial.state == TrialState.FAIL else trial.intermediate_values,
    )
    viewed.__class__ = _ViewedTrial
    return cast(_ViewedTrial, viewed)


def values_at_last(trial: FrozenTrial, space: Space) -> dict[str, Value]:
    """What the trial has of the keys that are drawn: in a population, other values than were drawn for it."""
    values = {key: value for key, value in values_of(trial).items() if key in space.distributions}
    return values if space.contains(values) else trial.params
