"""The study as a sampler should see it."""

import optuna
from optuna.samplers import BaseSampler, BruteForceSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from app.tuning.space import Space, Value
from app.tuning.trials import DUPLICATE_OF, LEARNED_FROM, values_of, waits


def view_of(study: Study, sampler: BaseSampler, space: Space) -> Study:
    """The study as a sampler should see it.

    Trials that wait count as pruned, for a running trial teaches nothing; a trial that failed counts as worse than all,
    for a sampler that never hears of it proposes it again. Duplicates are left out: one of a running trial is filed as
    failed, and the trial may be the best of all. A grid is not shown those that were learned from: they may lack keys.
    """
    left_out = {DUPLICATE_OF, LEARNED_FROM} if isinstance(sampler, BruteForceSampler) else {DUPLICATE_OF}
    view = optuna.create_study(sampler=sampler, directions=study.directions)
    for trial in study.get_trials(deepcopy=False):
        if trial.state == TrialState.WAITING or left_out & trial.user_attrs.keys():
            continue
        state = TrialState.PRUNED if waits(trial) or trial.state == TrialState.FAIL else trial.state
        params, known = values_at_last(trial, space), {**space.distributions, **trial.distributions}
        view.add_trial(
            create_trial(
                state=state,
                values=trial.values,
                params=params,
                distributions={key: known[key] for key in params},
                intermediate_values={} if trial.state == TrialState.FAIL else trial.intermediate_values,
            )
        )
    return view


def values_at_last(trial: FrozenTrial, space: Space) -> dict[str, Value]:
    """What the trial has of the keys that are drawn: in a population, other values than were drawn for it."""
    values = {key: value for key, value in values_of(trial).items() if key in space.distributions}
    return values if space.contains(values) else trial.params
