"""Studies that are there already: one to go on with, and those that a new one learns from."""

import optuna
from optuna.study import Study
from optuna.trial import TrialState, create_trial

from app.errors import TuningError
from app.tuning.space import Space
from app.tuning.storage import StudyPlace, explained, is_missing, open_storage, require_study_file
from app.tuning.trials import DUPLICATE_OF, LEARNED_FROM, best_trials
from app.tuning.view import values_at_last


def load_study(name: str, place: StudyPlace) -> Study:
    """Load a study that exists. Raises StorageError or TuningError."""
    require_study_file(place)
    storage = open_storage(place)
    with explained(place):
        if name not in optuna.get_all_study_names(storage):
            raise TuningError(f"there is no study {name!r} in {place}: give the id of a tune run that has been started")
        return optuna.load_study(study_name=name, storage=storage)


def load_earlier(name: str, place: StudyPlace) -> Study:
    """Load a study that ``tune.warm_start`` names. Raises StorageError or TuningError."""
    if is_missing(place):
        raise TuningError(f"tune.warm_start names {name!r}, and there is no study {place}: give ids of tune runs")
    return load_study(name, place)


def learn(study: Study, earlier: Study, space: Space) -> None:
    """Tell ``study`` of the trials of an earlier one that the space could have drawn, and try the best values again."""
    for trial in earlier.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
        params = values_at_last(trial, space)
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
        if space.contains(params := values_at_last(trial, space)):
            study.enqueue_trial(params)
