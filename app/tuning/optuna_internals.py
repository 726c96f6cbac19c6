"""Optuna's private parts, each use with its reason. No other module of the library touches them."""

from collections.abc import Sequence
from typing import Any

from optuna._typing import JSONSerializable
from optuna.distributions import BaseDistribution
from optuna.storages import RDBStorage
from optuna.storages._cached_storage import _CachedStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState


class SingleWriterStorage(_CachedStorage):
    """A cached storage for a study that no other process writes: it reads again only what this process wrote.

    Optuna's own cache reads every unfinished trial from the database about six times per proposal. With 200 paused
    trials that takes over a second. Optuna has no public setting for this.
    """

    def __init__(self, backend: RDBStorage) -> None:
        super().__init__(backend)
        self._written: set[int] = set()
        """Trials that were written since the last read."""
        self._loaded_studies: set[int] = set()

    def _read_trials_from_remote_storage(self, study_id: int) -> None:
        if study_id in self._loaded_studies:
            # Optuna reads the unfinished trials and everything after the last finished one. Narrow both down to what
            # this process wrote and what is new.
            study = self._studies[study_id]
            newest = max((trial._trial_id for trial in study.trials.values()), default=-1)
            study.unfinished_trial_ids, study.last_finished_trial_id = self._written, newest
        super()._read_trials_from_remote_storage(study_id)
        self._loaded_studies.add(study_id)
        self._written = set()

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        """Store a drawn value."""
        self._written.add(trial_id)
        super().set_trial_param(trial_id, param_name, param_value_internal, distribution)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """Store the trial's state and its objectives."""
        self._written.add(trial_id)
        return super().set_trial_state_values(trial_id, state, values)

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        """Store the value of an epoch."""
        self._written.add(trial_id)
        super().set_trial_intermediate_value(trial_id, step, intermediate_value)

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Store an attribute of ours."""
        self._written.add(trial_id)
        super().set_trial_user_attr(trial_id, key, value)

    def set_trial_system_attr(self, trial_id: int, key: str, value: JSONSerializable) -> None:
        """Store an attribute of Optuna's."""
        self._written.add(trial_id)
        super().set_trial_system_attr(trial_id, key, value)


def reopen_trial(study: Study, trial: FrozenTrial) -> Trial:
    """Return a running trial in a form that can be reported to.

    ``Study.ask`` only makes new trials, and the constructor needs the database's id, which has no public name.
    """
    return Trial(study, trial._trial_id)


def contains(distribution: BaseDistribution, value: float) -> bool:
    """Return True if the distribution can draw the number. The public API has only the bounds and the step."""
    return distribution._contains(distribution.to_internal_repr(value))
