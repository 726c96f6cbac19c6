"""When a search ends before its last trial."""

import math
import time
from typing import Any

from ray.tune import Stopper

from app.config import Objective, StopConfig
from app.tuning.study import SearchStudy


class Budget(Stopper):  # type: ignore[misc] # Ray has no types
    """Ends the whole search when time or epochs are spent, or nothing better has come for long."""

    def __init__(self, limits: StopConfig, objective: Objective, epochs: int, seconds: float) -> None:
        """``epochs`` and ``seconds`` were spent before, by the search that this one goes on with."""
        self._limits, self._sign = limits, 1.0 if objective.mode == "min" else -1.0
        self._began, self._epochs = time.monotonic() - seconds, epochs
        self.reason: str | None = None
        """Why the search ends early."""
        self.was_asked = False
        """Whether somebody asked for the end, so that the search can go on later."""

    @property
    def seconds(self) -> float:
        """Spent on the search until now, without those in which it was stopped."""
        return time.monotonic() - self._began

    def ask(self) -> None:
        """Somebody wants the search to end."""
        self.was_asked = True
        self.end("asked to stop")

    def end(self, reason: str) -> None:
        """End the search now."""
        self.reason = reason

    def epoch(self) -> None:
        """One was trained."""
        self._epochs += 1
        if self._limits.epochs and self._epochs >= self._limits.epochs:
            self.reason = f"tune.stop.epochs {self._limits.epochs} are trained"

    def check_patience(self, study: SearchStudy) -> None:
        """A trial ended, or waits at a rung: look whether the last ``patience`` times brought anything better."""
        patience = self._limits.patience
        if not patience:
            return
        costs = [math.inf if worth is None else self._sign * worth for worth in study.rung_results]
        if len(costs) <= patience:
            return
        before, recent = min(costs[:-patience]), min(costs[-patience:])
        if before < math.inf and (recent >= before or recent > before - self._limits.min_delta):
            self.reason = f"tune.stop.patience: nothing better in the last {patience} trials that ended or came to wait"

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:  # noqa: ARG002
        """No trial by itself."""
        return False

    def stop_all(self) -> bool:
        """Whether the search ends now."""
        limit = self._limits.time_s
        if limit and self.seconds > limit:
            self.reason = self.reason or f"tune.stop.time_s {limit:g} is over"
        return self.reason is not None
