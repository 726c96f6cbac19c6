"""Optuna's storage, for a study that no other process writes."""

from collections.abc import Sequence
from typing import Any

from optuna._typing import JSONSerializable
from optuna.distributions import BaseDistribution
from optuna.storages import RDBStorage
from optuna.storages._cached_storage import _CachedStorage
from optuna.trial import TrialState


class OnlyWriter(_CachedStorage):
    """Reads a trial anew only if this process has written to it since.

    Optuna's cache reads every unfinished trial whenever it looks at any, half a dozen times for each that is proposed:
    of two hundred that wait at a rung, a second and more.
    """

    def __init__(self, backend: RDBStorage) -> None:
        super().__init__(backend)
        self._written: set[int] = set()
        self._known: set[int] = set()
        """Studies of which every trial was read once."""

    def _read_trials_from_remote_storage(self, study_id: int) -> None:
        if study_id in self._known:
            study = self._studies[study_id]
            newest = max((each._trial_id for each in study.trials.values()), default=-1)
            study.unfinished_trial_ids, study.last_finished_trial_id = self._written, newest
        super()._read_trials_from_remote_storage(study_id)
        self._known.add(study_id)
        self._written = set()

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        """A value that was drawn."""
        self._written.add(trial_id)
        super().set_trial_param(trial_id, param_name, param_value_internal, distribution)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """What became of the trial."""
        self._written.add(trial_id)
        return super().set_trial_state_values(trial_id, state, values)

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        """What it reported."""
        self._written.add(trial_id)
        super().set_trial_intermediate_value(trial_id, step, intermediate_value)

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        """What is noted of it."""
        self._written.add(trial_id)
        super().set_trial_user_attr(trial_id, key, value)

    def set_trial_system_attr(self, trial_id: int, key: str, value: JSONSerializable) -> None:
        """What Optuna notes of it."""
        self._written.add(trial_id)
        super().set_trial_system_attr(trial_id, key, value)
