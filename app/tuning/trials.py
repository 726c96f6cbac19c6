"""The attributes that a study stores of each trial, the best trials, and the warm start from earlier studies."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Literal

from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from app.errors import TuningError
from app.tuning.space import Space, Value
from app.tuning.storage import StudyLocation, is_missing, load_study

CAUSE, EPOCHS, VALUES, FAILURES, STOPPED_EARLY, DUPLICATE_OF, LEARNED_FROM = (
    "cause", "epochs", "values", "failures", "stopped_early", "duplicate_of", "learned_from",
)  # fmt: skip
"""Attributes of a trial. ``VALUES`` holds drawn and derived values, Optuna's own ``params`` only drawn ones."""

ENDINGS: dict[TrialState, Literal["complete", "pruned", "failed"]] = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
"""How a trial may end, in a word."""

INHERITED = "inherited"
"""Attribute of a trial that continued from others' checkpoints: their epochs, less its own that it gave up."""

PAUSED = "waits"
"""Attribute of a trial that is running in the study, and paused at a rung until it is promoted."""

RUNG_RESULTS = "rests"
"""Attribute of a trial: a list of (position, value), one for each time that it ended or was paused.

Positions count over all trials of the study; the value is the first objective.
"""

KEPT = "kept"
"""Attribute of a trial with one objective: cost and objective of the epoch whose weights training keeps so far."""


def own_trials(study: Study) -> list[FrozenTrial]:
    """Return the search's own begun trials, in order, without duplicates and without trials of earlier studies."""
    return [
        trial
        for trial in study.get_trials(deepcopy=False)
        if trial.state != TrialState.WAITING and not {LEARNED_FROM, DUPLICATE_OF} & trial.user_attrs.keys()
    ]


def objective_values(trial: FrozenTrial) -> list[float]:
    """Return the objectives at the best epoch (for an unfinished or pruned trial: the best epoch so far).

    Empty if there is no value, as for a failed trial. With several objectives, only completed trials have values.
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
    """Return the trial with the best value, or with several objectives the Pareto front, best in the first one first.

    Pruned and running trials count. Trained to its end, such a trial keeps its best epoch, so it cannot get worse.
    """
    signs = [1.0 if direction == StudyDirection.MINIMIZE else -1.0 for direction in study.directions]
    losses: dict[int, list[float]] = {}
    with_values = []
    for trial in own_trials(study):
        if values := objective_values(trial):
            losses[trial.number] = [sign * value for sign, value in zip(signs, values, strict=True)]
            with_values.append(trial)
    with_values.sort(key=lambda trial: (losses[trial.number], trial.number))
    if len(signs) == 1:
        return with_values[:1]
    front: list[FrozenTrial] = []
    # Only an earlier trial can dominate a later one. If one does, so does one of the front.
    for trial in with_values:
        if not any(_dominates(losses[other.number], losses[trial.number]) for other in front):
            front.append(trial)
    return front


def is_paused(trial: FrozenTrial) -> bool:
    """Return True if the trial is paused at a rung until it is promoted."""
    return trial.state == TrialState.RUNNING and bool(trial.user_attrs.get(PAUSED))


def rung_results_of(study: Study) -> list[float | None]:
    """Return the first objective of each trial that ended or was paused, in that order; None if it has no value."""
    recorded = [item for trial in study.get_trials(deepcopy=False) for item in trial.user_attrs.get(RUNG_RESULTS, [])]
    return [value for _, value in sorted(recorded, key=itemgetter(0))]


def epochs_of(trial: FrozenTrial) -> int:
    """Return the number of epochs that the trial itself trained."""
    return int(trial.user_attrs.get(EPOCHS, 0)) - int(trial.user_attrs.get(INHERITED, 0))


def values_of(trial: FrozenTrial) -> dict[str, Value]:
    """Return the trial's values of recipe keys. In a population, these are its last ones."""
    return dict(trial.user_attrs.get(VALUES, trial.params))


def last_params(trial: FrozenTrial, space: Space) -> dict[str, Value]:
    """Return the trial's values of the drawn keys. In a population, they differ from the ones that were drawn."""
    names = {version: name for name, version in space.versions.items()}
    values = {key: names.get(value, value) for key, value in values_of(trial).items() if key in space.distributions}
    return values if space.contains(values) else trial.params


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return True if ``one`` is nowhere worse and somewhere better, lower being better."""
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def load_earlier(name: str, location: StudyLocation) -> Study:
    """Load a study that ``tune.warm_start`` names. Raises StorageError or TuningError."""
    if is_missing(location):
        raise TuningError(
            f"tune.warm_start names {name!r}, and there is no study {location}: give ids of tune runs"
        ).of("study.unknown", "tune.warm_start")
    return load_study(name, location)


def warm_start(study: Study, earlier: Study, space: Space) -> None:
    """Add an earlier study's trials to ``study`` if the space could have drawn them, and enqueue its best values."""
    for trial in earlier.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
        params = last_params(trial, space)
        # Only what the earlier study trained itself. It may be named beside a study that it learned from.
        if {LEARNED_FROM, DUPLICATE_OF} & trial.user_attrs.keys() or not space.contains(params):
            continue
        study.add_trial(
            create_trial(
                state=trial.state,
                values=trial.values,
                params=params,
                distributions={key: space.distributions[key] for key in params},
                intermediate_values=trial.intermediate_values,
                user_attrs={LEARNED_FROM: f"{earlier.study_name} trial {trial.number}"},
            )
        )
    for trial in best_trials(earlier):
        if space.contains(params := last_params(trial, space)):
            study.enqueue_trial(params)
