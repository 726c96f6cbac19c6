"""Failures that work does not depend on: they are printed as warnings, and the work goes on."""

import sys
from collections.abc import Callable


def warn(message: str) -> None:
    """Print a warning to stderr, where a person reads it."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


class BestEffort:
    """Runs an optional action repeatedly, and warns each time that it starts to fail."""

    def __init__(self, failure: str, work: str = "training", *, hides_error: bool = False) -> None:
        """Name what cannot be done, and the work that goes on without it.

        ``hides_error``: print only the type of an error, whose message may contain a secret.
        """
        self._failure, self._work, self._hides_error = failure, work, hides_error
        self._is_failing = False

    def __call__(self, action: Callable[[], object]) -> bool:
        """Run ``action``, and return whether it succeeded."""
        try:
            action()
        except Exception as error:  # of torch, of the GPU's profiling library, of storage's driver
            if not self._is_failing:
                reason = type(error).__name__ + ("" if self._hides_error else f": {error}")
                warn(f"{self._failure} ({reason}); {self._work} goes on")
            self._is_failing = True
        else:
            self._is_failing = False
        return not self._is_failing


def best_effort(action: Callable[[], object], failure: str, work: str = "training") -> bool:
    """Run ``action``, which ``work`` does not depend on. Return whether it succeeded; if not, warn of ``failure``."""
    return BestEffort(failure, work)(action)
