"""What a study holds of each trial."""

from collections.abc import Sequence

from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from app.tuning.space import Value

CAUSE, EPOCHS, VALUES, FAILURES, STOPPED_EARLY, DUPLICATE_OF, LEARNED_FROM = (
    "cause", "epochs", "values", "failures", "stopped_early", "duplicate_of", "learned_from",
)  # fmt: skip
"""What is noted of a trial beside its values."""

WAITS = "waits"
"""Noted of a trial that runs in the study, and waits at a rung for a promotion."""


def own_trials(study: Study) -> list[FrozenTrial]:
    """Those of the search itself, in order: without those it learned from, duplicates, and what is yet to begin."""
    return [
        each
        for each in study.get_trials(deepcopy=False)
        if each.state != TrialState.WAITING and not {LEARNED_FROM, DUPLICATE_OF} & each.user_attrs.keys()
    ]


def best_trials(study: Study) -> list[FrozenTrial]:
    """The best trial that was completed; of several objectives the Pareto front, best first in the first one."""
    complete = [each for each in own_trials(study) if each.state == TrialState.COMPLETE]
    signs = [1.0 if each == StudyDirection.MINIMIZE else -1.0 for each in study.directions]
    losses = {
        each.number: [sign * value for sign, value in zip(signs, each.values or [], strict=True)] for each in complete
    }
    front = [
        each
        for each in complete
        if not any(_dominates(losses[other.number], losses[each.number]) for other in complete)
    ]
    front.sort(key=lambda each: (losses[each.number], each.number))
    return front if len(signs) > 1 else front[:1]


def waits(trial: FrozenTrial) -> bool:
    """Whether the trial waits at a rung for a promotion."""
    return trial.state == TrialState.RUNNING and bool(trial.user_attrs.get(WAITS))


def epochs_of(trial: FrozenTrial) -> int:
    """Epochs that the trial trained."""
    return int(trial.user_attrs.get(EPOCHS, 0))


def values_of(trial: FrozenTrial) -> dict[str, Value]:
    """The recipe keys of the trial, with what they became."""
    return dict(trial.user_attrs.get(VALUES, trial.params))


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether ``one`` is nowhere worse, lower being better, and somewhere better."""
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
