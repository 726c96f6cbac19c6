"""The table of trials in the job's log."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from optuna.trial import FrozenTrial, TrialState

from app.config import Objective
from app.tuning.space import Value
from app.tuning.study import SearchStudy
from app.tuning.trial_config import EpochResult
from app.tuning.trials import CAUSE, ENDINGS, FAILURES, epochs_of, objective_values, values_of

_RUNNING_INTERVAL_S = 15.0
_ROWS_PER_HEADER = 20


@dataclass
class _Running:
    values: Mapping[str, Value]
    epoch: int = 0
    value: float | None = None


class Table:
    """Prints a row when a trial ends or is paused, and every 15 s one for each running trial."""

    def __init__(self, objectives: list[Objective], epochs: int, trials: int) -> None:
        self._objectives, self._epochs, self._trials = objectives, epochs, trials
        self._running: dict[int, _Running] = {}
        self._rows, self._shown = 0, time.monotonic()

    def started(self, number: int, values: Mapping[str, Value]) -> None:
        """Add a running trial, or change its values."""
        known = self._running.get(number)
        self._running[number] = _Running(values, known.epoch if known else 0, known.value if known else None)

    def epoch(self, number: int, result: EpochResult) -> None:
        """Update a running trial after an epoch, and print the running trials if it is time."""
        running = self._running[number]
        running.epoch, running.value = result.epoch, result.value
        if time.monotonic() - self._shown > _RUNNING_INTERVAL_S:
            for other, now in sorted(self._running.items()):
                if other != number or now.epoch < self._epochs:
                    # Otherwise the row of its end comes next.
                    self._row(other, [now.value] if now.value is not None else [], now.epoch, "running", now.values)

    def paused(self, number: int) -> None:
        """Print a trial that is paused until it is promoted."""
        now = self._running.pop(number)
        self._row(number, [now.value] if now.value is not None else [], now.epoch, "paused", now.values)

    def failed(self, number: int, values: Mapping[str, Value], cause: str) -> None:
        """Print a failure after which the trial is run again. The trial may not have begun."""
        running = self._running.get(number)
        self._row(number, [], running.epoch if running else 0, "retried", values)
        print(f"       {cause}", flush=True)

    def ended(self, study: SearchStudy, number: int) -> None:
        """Print a trial that has ended."""
        self._running.pop(number, None)
        trial = study.study.get_trials(deepcopy=False)[number]
        self.show(trial, is_best=any(best.number == number for best in study.best))
        print(f"trials {len(study.ended)}/{self._trials}  ended", flush=True)

    def show(self, trial: FrozenTrial, is_best: bool) -> None:
        """Print the row of a trial that has ended."""
        self._row(
            trial.number, objective_values(trial), epochs_of(trial), ENDINGS[trial.state], values_of(trial), is_best
        )
        if trial.state == TrialState.FAIL:
            print(f"       {trial.user_attrs.get(CAUSE, '')}", flush=True)
        elif retried := len(trial.user_attrs.get(FAILURES, [])):
            print(f"       after {retried} failed attempts", flush=True)

    def _row(
        self,
        number: int,
        objectives: list[float],
        epoch: int,
        state: str,
        values: Mapping[str, Value],
        is_best: bool = False,
    ) -> None:
        if self._rows % _ROWS_PER_HEADER == 0:
            names = "".join(f"{objective.metric:>14}" for objective in self._objectives)
            print(f"{'trial':>5}  {'state':<8} {'epochs':>7} {names}    values", flush=True)
        self._rows, self._shown = self._rows + 1, time.monotonic()
        shown = [f"{value:.6g}" for value in objectives]
        shown += ["-"] * (len(self._objectives) - len(shown))
        columns = "".join(f"{value:>14}" for value in shown)
        epochs = f"{epoch}/{self._epochs}"
        mark = "*" if is_best else " "
        print(f"{number:>5}  {state:<8} {epochs:>7} {columns} {mark}  {show_values(values)}", flush=True)


def show_values(values: Mapping[str, Value]) -> str:
    """Return the values on one line, each with the shortest suffix of its key that no other key has."""
    return "  ".join(f"{name}={_short(values[key])}" for key, name in short_names(list(values)).items())


def short_names(keys: list[str]) -> dict[str, str]:
    """Map each key's last part to the key. Longer where two keys end alike, or where the last part is an index."""
    names = {}
    for key in keys:
        parts = key.split(".")
        ends = [".".join(parts[-length:]) for length in range(1, len(parts) + 1)]
        own = [end for end in ends if sum(f".{other}".endswith(f".{end}") for other in keys) == 1]
        names[key] = next(end for end in own if not end.isdecimal())
    return names


def _short(value: Value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
