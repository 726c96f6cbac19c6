"""What a study holds of each trial."""

from collections.abc import Sequence
from operator import itemgetter

from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from app.tuning.space import Value

CAUSE, EPOCHS, VALUES, FAILURES, STOPPED_EARLY, DUPLICATE_OF, LEARNED_FROM = (
    "cause", "epochs", "values", "failures", "stopped_early", "duplicate_of", "learned_from",
)  # fmt: skip
"""What is noted of a trial beside its values."""

INHERITED = "inherited"
"""Noted of a trial that went on from others' checkpoints: epochs that they trained, less its own that it gave up."""

WAITS = "waits"
"""Noted of a trial that runs in the study, and waits at a rung for a promotion."""

RUNG_RESULTS = "rests"
"""Attribute of a trial: a list of (position, value), one for each time that it ended or came to wait.

Positions count over all trials of the study; the value is the first objective. Earlier versions wrote an attribute of
the study instead: only the values, in order.
"""

KEPT = "kept"
"""Noted of a trial with one objective: of the epoch whose weights training keeps so far, its cost and the objective."""


def own_trials(study: Study) -> list[FrozenTrial]:
    """Those of the search itself, in order: without those it learned from, duplicates, and what is yet to begin."""
    return [
        each
        for each in study.get_trials(deepcopy=False)
        if each.state != TrialState.WAITING and not {LEARNED_FROM, DUPLICATE_OF} & each.user_attrs.keys()
    ]


def worth_of(trial: FrozenTrial) -> list[float]:
    """The objectives in the epoch whose weights training keeps; of a trial that was cut short, would keep so far.

    Empty if nothing is known, as of one that failed. Several objectives are known of complete trials alone.
    """
    if trial.state == TrialState.COMPLETE:
        return list(trial.values)
    kept = kept_value(trial)
    return [kept] if kept is not None and trial.state != TrialState.FAIL else []


def kept_value(trial: Trial | FrozenTrial) -> float | None:
    """Return the objective at the epoch whose weights training keeps so far; None if there is no value."""
    kept = trial.user_attrs.get(KEPT)
    return kept[1] if kept else None


def best_trials(study: Study) -> list[FrozenTrial]:
    """The trial that is worth most, whether it has come to its end or not; of several objectives the Pareto front.

    A trial that was cut short is the beginning of a whole one, which keeps its best epoch: it comes to no less. Of a
    front, the best in the first objective comes first.
    """
    signs = [1.0 if each == StudyDirection.MINIMIZE else -1.0 for each in study.directions]
    known = [each for each in own_trials(study) if worth_of(each)]
    losses = {each.number: [sign * value for sign, value in zip(signs, worth_of(each), strict=True)] for each in known}
    known.sort(key=lambda each: (losses[each.number], each.number))
    if len(signs) == 1:
        return known[:1]
    front: list[FrozenTrial] = []
    for trial in known:  # only an earlier trial can dominate a trial; if one does, so does one of the front
        if not any(_dominates(losses[other.number], losses[trial.number]) for other in front):
            front.append(trial)
    return front


def waits(trial: FrozenTrial) -> bool:
    """Whether the trial waits at a rung for a promotion."""
    return trial.state == TrialState.RUNNING and bool(trial.user_attrs.get(WAITS))


def rung_results_of(study: Study) -> list[float | None]:
    """Return the first objective of each trial that ended or came to wait, in that order; None if it has no value."""
    noted = [result for trial in study.get_trials(deepcopy=False) for result in trial.user_attrs.get(RUNG_RESULTS, [])]
    return [*study.user_attrs.get(RUNG_RESULTS, []), *(value for _, value in sorted(noted, key=itemgetter(0)))]


def epochs_of(trial: FrozenTrial) -> int:
    """Epochs that the trial itself trained."""
    return int(trial.user_attrs.get(EPOCHS, 0)) - int(trial.user_attrs.get(INHERITED, 0))


def values_of(trial: FrozenTrial) -> dict[str, Value]:
    """The recipe keys of the trial, with what they became; in a population, what they were last."""
    return dict(trial.user_attrs.get(VALUES, trial.params))


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether ``one`` is nowhere worse, lower being better, and somewhere better."""
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
