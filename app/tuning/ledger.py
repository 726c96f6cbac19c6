"""What Ray Tune says of trials, written into the study as it happens."""

import logging
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from ray import cloudpickle, tune
from ray.exceptions import RayActorError
from ray.tune.experiment import Trial
from upath import UPath

from app.config import TuneConfig
from app.errors import ActorBusyError, UnsharedStorageError
from app.training.run_folder import FAILURE_FILE
from app.tuning.budget import Budget
from app.tuning.promotion import Promotion
from app.tuning.results import CLONED, ENDED, LAST_REPORTED_EPOCH, NUMBER, VALUES, EpochResult, FinalResult
from app.tuning.study import SearchStudy
from app.tuning.table import Table

LOG = logging.getLogger(__name__)
Hook = TypeVar("Hook", bound=Callable[..., None])


def _writes(hook: Hook) -> Hook:
    """What goes wrong in ``hook`` ends the search; Ray Tune would take it for a failure of the trial."""

    @wraps(hook)
    def guarded(self: "Ledger", **event: Any) -> None:
        if self.broken is None:
            try:
                hook(self, **event)
            except Exception as error:  # raised once the search has ended
                self.broken = error
                self._budget.end("the study cannot be written")

    return cast(Hook, guarded)


class Ledger(tune.Callback):  # type: ignore[misc] # Ray has no types
    """Files each trial once: complete if it came to its own end, pruned if it was stopped, failed with its cause."""

    def __init__(
        self,
        study: SearchStudy,
        config: TuneConfig,
        trials: UPath,
        budget: Budget,
        table: Table,
        promotion: Promotion | None,
        secure: Callable[[], object],
    ) -> None:
        """``secure`` makes what is in the study survive the loss of this machine."""
        self._study, self._config, self._trials = study, config, trials
        self._budget, self._table, self._promotion = budget, table, promotion
        self._secure = secure
        self.broken: Exception | None = None
        """What ended the search, other than a trial."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for Ray Tune, which only stores it. A database connection cannot be pickled."""
        return {**self.__dict__, "_secure": None}

    @_writes
    def on_trial_start(self, trial: Trial, **_: Any) -> None:
        """Ray Tune counts failures anew with each promotion: how many are left of the trial's own is told here."""
        failures = self._study.failures(trial.config[NUMBER])
        trial.max_failures = trial.num_failures + max(0, self._config.retries - failures)
        self._note_origin(trial)
        self._table.started(trial.config[NUMBER], trial.config[VALUES])

    def _note_origin(self, trial: Trial) -> None:
        """Note that a trial of a population goes on from another's checkpoint.

        This comes before Ray Tune replaces the trial's own checkpoints, so a resumed search knows their values.
        """
        number, values, epoch = trial.config[NUMBER], trial.config[VALUES], trial.config[LAST_REPORTED_EPOCH]
        if self._config.scheduler == "pbt" and self._study.take_over(number, values, epoch):
            self._secure()

    @_writes
    def on_trial_result(self, trial: Trial, result: dict[str, Any], **_: Any) -> None:
        """An epoch, also the one after which the trial is stopped; the end of a trial, perhaps with its last epoch."""
        epoch = EpochResult.model_validate(result)
        if ENDED in result and epoch.epoch == trial.config[LAST_REPORTED_EPOCH]:
            return
        self._study.report(trial.config[NUMBER], epoch.epoch, epoch.value, epoch.cost)
        if not trial.config.pop(CLONED, False):  # just now, by the scheduler
            trial.config[LAST_REPORTED_EPOCH] = epoch.epoch
        self._budget.epoch()
        self._study.note_seconds(self._budget.seconds)
        self._table.epoch(trial.config[NUMBER], epoch)

    @_writes
    def on_trial_complete(self, trial: Trial, **_: Any) -> None:
        """The trial's own end, or the scheduler's."""
        number, result = trial.config[NUMBER], trial.last_result
        if ENDED in result:
            final = FinalResult.model_validate(result)
            self._study.complete(number, final.final_values, final.stopped_early)
        elif self._promotion:
            self._study.wait(number)
            self._budget.check_patience(self._study)
            self._table.waits(number)
            return
        else:
            self._study.prune(number, f"stopped by {self._config.scheduler} after epoch {result.get('epoch', 0)}")
        self._ended(number)

    @_writes
    def on_trial_recover(self, trial: Trial, **_: Any) -> None:
        """A failure, after which the trial is run again."""
        number, cause = trial.config[NUMBER], self._cause(trial, _pickled_error(trial))
        self._study.note_failure(number, cause)
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
        self._ended(number)

    def _ended(self, number: int) -> None:
        self._study.note_seconds(self._budget.seconds)
        self._budget.check_patience(self._study)
        self._table.ended(self._study, number)

    def _folder(self, number: int) -> UPath:
        return self._trials / f"{number:04d}"

    def _cause(self, trial: Trial, error: Exception | None) -> str:
        """What a worker noted before it ended itself, else the error, without Ray's traceback."""
        note = self._folder(trial.config[NUMBER]) / FAILURE_FILE
        if note.exists():
            return note.read_text(encoding="utf-8")
        if error is None:
            return _noted_last(Path(trial.error_file).read_text(encoding="utf-8"))
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
    file.unlink()  # the next failure may be of a kind that Ray Tune does not pickle, such as a lack of memory
    return cast(Exception, getattr(error, "cause", None) or error)


def _noted_last(text: str) -> str:
    """Of the failures that Ray Tune noted in its file the last: the first line of it; of a traceback the last."""
    lines = text.rpartition("Failure # ")[2].partition("\n")[2].strip().splitlines()
    if lines and not lines[0].startswith("Traceback"):
        return lines[0]
    return _last_line(text)


def _exit_detail(text: str) -> str:
    """Ray's own reason, the last of its sentences that gives one."""
    for marker in ("Worker exit detail: ", "The actor is dead because "):
        if marker in text:
            return text.partition(marker)[2].strip().splitlines()[0]
    return _last_line(text)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason is known"])[-1]
