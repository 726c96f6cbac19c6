"""The limits that end a search before its last trial: time, epochs, patience, or a request to stop."""

import math
import time
from typing import Any

from ray.tune import Stopper

from app.config import Objective, StopConfig
from app.tuning.study import SearchStudy


class SearchBudget(Stopper):  # type: ignore[misc] # Ray has no types
    """Ends the search when time, epochs or patience are used up, or when it is asked to stop."""

    def __init__(self, limits: StopConfig, objective: Objective, epochs: int, seconds: float) -> None:
        """``epochs`` and ``seconds`` were used before the search was resumed; 0 for a new search."""
        self._limits, self._sign = limits, 1.0 if objective.mode == "min" else -1.0
        # As if the search had never been interrupted: its limits hold for all its parts together.
        self._began, self._epochs = time.monotonic() - seconds, epochs
        self.reason: str | None = None
        """Why the search ends early; None if it does not."""
        self.stop_requested = False
        """Whether the search was asked to stop. Its trials then stay resumable."""

    @property
    def seconds(self) -> float:
        """How long the search has run. Interruptions do not count."""
        return time.monotonic() - self._began

    def request_stop(self) -> None:
        """End the search because somebody asked for it."""
        self.stop_requested = True
        self.end("asked to stop")

    def end(self, reason: str) -> None:
        """End the search now."""
        self.reason = reason

    def record_epoch(self) -> None:
        """Count a trained epoch."""
        self._epochs += 1
        if self._limits.epochs and self._epochs >= self._limits.epochs:
            self.reason = f"tune.stop.epochs {self._limits.epochs} are trained"

    def check_patience(self, study: SearchStudy) -> None:
        """End the search if the last ``patience`` trials that ended or were paused brought nothing better."""
        patience = self._limits.patience
        if not patience:
            return
        # Costs are minimized in either mode.
        costs = [math.inf if value is None else self._sign * value for value in study.rung_results]
        if len(costs) <= patience:
            return
        before, recent = min(costs[:-patience]), min(costs[-patience:])
        # Trials without a value do not use up the patience.
        # The comparison without ``min_delta`` is for a delta of 0: an equal value is not better.
        if before < math.inf and (recent >= before or recent > before - self._limits.min_delta):
            self.reason = f"tune.stop.patience: nothing better in the last {patience} trials that ended or were paused"

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:  # noqa: ARG002
        """Return False: single trials are ended by the scheduler."""
        return False

    def stop_all(self) -> bool:
        """Return True if the search ends now. Ray Tune calls this after each result."""
        limit = self._limits.time_s
        if limit and self.seconds > limit:
            self.reason = self.reason or f"tune.stop.time_s {limit:g} is over"
        return self.reason is not None
