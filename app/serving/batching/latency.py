"""How long a call of the engine takes, learnt from recent calls."""

import math

_RECENT_CALLS = 16
"""A call that is so many calls old weighs a third of the newest."""
_SETTLED = 8
"""Calls after which one can be seen to be an outlier."""
_OUTLIER = 4.0
"""No call counts as more than so many times what was expected, and a millisecond: the machine was busy elsewhere."""
_LEAST_VARIANCE = 1e-3
"""Of rows. Below it calls are all of one size and say nothing about what a row costs."""


class LatencyModel:
    """A call of n rows takes ``row_s * n + call_s`` seconds: least squares over calls, exponentially weighted.

    Mean, variance and covariance are kept, so that a call costs the same few operations however many there were.
    Neither number is negative. Until calls differ in size a row is taken to cost nothing.
    """

    def __init__(self) -> None:
        self.row_s = 0.0
        self.call_s = 0.0
        self._calls = 0
        self._mean_rows = 0.0
        self._mean_s = 0.0
        self._variance = 0.0
        self._covariance = 0.0

    def seconds(self, rows: int) -> float:
        """What a call of so many rows takes; 0 before the first."""
        return self.row_s * rows + self.call_s

    def seconds_in_calls(self, rows: int, max_rows: int) -> float:
        """Return the time that rows take in consecutive calls of ``max_rows`` at most."""
        return self.row_s * rows + self.call_s * math.ceil(rows / max_rows)

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a call."""
        if self._calls >= _SETTLED:
            seconds = min(seconds, _OUTLIER * self.seconds(rows) + 1e-3)
        self._calls += 1
        weight = 1 / min(self._calls, _RECENT_CALLS)
        more_rows, more_s = rows - self._mean_rows, seconds - self._mean_s
        self._mean_rows += weight * more_rows
        self._mean_s += weight * more_s
        self._variance = (1 - weight) * (self._variance + weight * more_rows * more_rows)
        self._covariance = (1 - weight) * (self._covariance + weight * more_rows * more_s)
        slope = self._covariance / self._variance if self._variance > _LEAST_VARIANCE else self.row_s
        self.row_s = min(max(slope, 0.0), self._mean_s / self._mean_rows)
        self.call_s = self._mean_s - self.row_s * self._mean_rows
