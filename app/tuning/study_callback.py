"""The callback of Ray Tune that writes each event of a trial into the study."""

import logging
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from ray import cloudpickle, tune
from ray.exceptions import RayActorError
from ray.tune.experiment import Trial
from upath import UPath

from app.artifacts import FAILURE_FILE
from app.config import TuneConfig
from app.errors import ActorBusyError, UnsharedStorageError
from app.tuning.budget import SearchBudget
from app.tuning.promotion import Promotion
from app.tuning.study import SearchStudy
from app.tuning.table import Table
from app.tuning.trial_config import CLONED, ENDED, LAST_REPORTED_EPOCH, NUMBER, VALUES, EpochResult, FinalResult

LOG = logging.getLogger(__name__)
Hook = TypeVar("Hook", bound=Callable[..., None])


def _writes(hook: Hook) -> Hook:
    """End the search if ``hook`` fails. Ray Tune would count the error as a failure of the trial."""

    @wraps(hook)
    def guarded(self: "StudyCallback", **event: Any) -> None:
        if self.broken is None:
            try:
                hook(self, **event)
            except Exception as error:  # raised once the search has ended
                self.broken = error
                self._budget.end("the study cannot be written")

    return cast(Hook, guarded)


class StudyCallback(tune.Callback):  # type: ignore[misc] # Ray has no types
    """Records each trial once: complete if training ended, pruned if it was stopped, or failed with its cause."""

    def __init__(
        self,
        study: SearchStudy,
        config: TuneConfig,
        trials: UPath,
        budget: SearchBudget,
        table: Table,
        promotion: Promotion | None,
        back_up: Callable[[], object],
    ) -> None:
        """``back_up`` stores a copy of the study that survives the loss of this machine."""
        self._study, self._config, self._trials = study, config, trials
        self._budget, self._table, self._promotion = budget, table, promotion
        self._back_up = back_up
        self.broken: Exception | None = None
        """The error of a hook, which ended the search."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for Ray Tune, which only stores it. A database connection cannot be pickled."""
        return {**self.__dict__, "_back_up": None}

    @_writes
    def on_trial_start(self, trial: Trial, **_: Any) -> None:
        """Set the remaining retries, because Ray Tune starts to count at zero after each promotion or resume."""
        failures = self._study.num_failures(trial.config[NUMBER])
        trial.max_failures = trial.num_failures + max(0, self._config.retries - failures)
        self._record_origin(trial)
        self._table.started(trial.config[NUMBER], trial.config[VALUES])

    def _record_origin(self, trial: Trial) -> None:
        """Record that a trial of a population continues from another's checkpoint.

        Ray Tune replaces the trial's own checkpoints after this. So a resumed search has the values of its checkpoint.
        """
        number, values, epoch = trial.config[NUMBER], trial.config[VALUES], trial.config[LAST_REPORTED_EPOCH]
        if self._config.scheduler == "pbt" and self._study.record_clone(number, values, epoch):
            self._back_up()

    @_writes
    def on_trial_result(self, trial: Trial, result: dict[str, Any], **_: Any) -> None:
        """Record an epoch. The final result may repeat an epoch that is recorded already."""
        epoch = EpochResult.model_validate(result)
        if ENDED in result and epoch.epoch == trial.config[LAST_REPORTED_EPOCH]:
            return
        self._study.report(trial.config[NUMBER], epoch.epoch, epoch.value, epoch.cost)
        # The scheduler runs before this callback. If it has just replaced the configuration by that of another trial,
        # the epoch in it is that of the other's checkpoint.
        if not trial.config.pop(CLONED, False):
            trial.config[LAST_REPORTED_EPOCH] = epoch.epoch
        self._budget.record_epoch()
        self._study.record_seconds(self._budget.seconds)
        self._table.epoch(trial.config[NUMBER], epoch)

    @_writes
    def on_trial_complete(self, trial: Trial, **_: Any) -> None:
        """Record the end of training, or the scheduler's decision to pause or end the trial."""
        number, result = trial.config[NUMBER], trial.last_result
        if ENDED in result:
            final = FinalResult.model_validate(result)
            self._study.complete(number, final.final_values, final.stopped_early)
        elif self._promotion:
            self._study.pause(number)
            self._budget.check_patience(self._study)
            self._table.paused(number)
            return
        else:
            self._study.prune(number, f"stopped by {self._config.scheduler} after epoch {result.get('epoch', 0)}")
        self._record_end(number)

    @_writes
    def on_trial_recover(self, trial: Trial, **_: Any) -> None:
        """Record a failure after which the trial is run again."""
        number, cause = trial.config[NUMBER], self._cause(trial, _pickled_error(trial))
        self._study.record_failure(number, cause)
        self._table.failed(number, trial.config[VALUES], cause)

    @_writes
    def on_trial_error(self, trial: Trial, **_: Any) -> None:
        """Record a trial's last failure. A trial whose actor was busy has not failed: it starts in another actor."""
        number, error = trial.config[NUMBER], _pickled_error(trial)
        if isinstance(error, ActorBusyError):
            LOG.warning("trial %d starts in a new actor: %s", number, error)
            self._study.put_back(number)
            return
        self._study.fail(number, self._cause(trial, error))
        if self._promotion:
            self._promotion.drop(number)
        self._record_end(number)

    def _record_end(self, number: int) -> None:
        self._study.record_seconds(self._budget.seconds)
        self._budget.check_patience(self._study)
        self._table.ended(self._study, number)

    def _folder(self, number: int) -> UPath:
        return self._trials / f"{number:04d}"

    def _cause(self, trial: Trial, error: Exception | None) -> str:
        """Return the cause that a worker wrote before it ended itself, else the error without Ray's traceback."""
        failure_file = self._folder(trial.config[NUMBER]) / FAILURE_FILE
        if failure_file.exists():
            return failure_file.read_text(encoding="utf-8")
        if error is None:
            return _last_failure(Path(trial.error_file).read_text(encoding="utf-8"))
        if isinstance(error, RayActorError):
            return f"the trial's process ended: {_exit_detail(str(error))}"
        if isinstance(error, UnsharedStorageError):
            raise error  # every trial on that node would fail the same way
        return f"{type(error).__name__}: {_last_line(str(error))}"


def _pickled_error(trial: Trial) -> Exception | None:
    """Return the trial's exception, as Ray Tune pickled it; None for a failure that Ray Tune only describes."""
    file = Path(trial.pickled_error_file or "")  # Ray Tune uploads it to storage later
    if not file.is_file():
        return None
    error = cloudpickle.loads(file.read_bytes())
    # The next failure may be of a kind that Ray Tune does not pickle, such as a lack of memory.
    file.unlink()
    return cast(Exception, getattr(error, "cause", None) or error)


def _last_failure(text: str) -> str:
    """Return one line about the last failure in Ray Tune's file: the first line, or of a traceback the last."""
    lines = text.rpartition("Failure # ")[2].partition("\n")[2].strip().splitlines()
    if lines and not lines[0].startswith("Traceback"):
        return lines[0]
    return _last_line(text)


def _exit_detail(text: str) -> str:
    """Return Ray's reason for the end of a process, without its advice."""
    for marker in ("Worker exit detail: ", "The actor is dead because "):
        if marker in text:
            return text.partition(marker)[2].strip().splitlines()[0]
    return _last_line(text)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason is known"])[-1]
