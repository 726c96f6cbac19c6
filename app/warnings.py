"""Failures that work does not depend on: they are printed as warnings, and the work goes on."""

import sys
from collections.abc import Callable


def warn(message: str) -> None:
    """Print a warning to stderr, where a person reads it."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


class BestEffort:
    """Runs an optional action repeatedly, and warns each time that it starts to fail."""

    def __init__(self, failure: str, work: str = "training") -> None:
        """``failure`` says what cannot be done. ``work`` names what goes on without it."""
        self._failure, self._work = failure, work
        self._is_failing = False

    def __call__(self, action: Callable[[], object]) -> bool:
        """Run ``action``, and return whether it succeeded."""
        try:
            action()
        except Exception as error:  # of torch, of the GPU's profiling library, of storage's driver
            if not self._is_failing:
                warn(f"{self._failure} ({type(error).__name__}: {error}); {self._work} goes on")
            self._is_failing = True
        else:
            self._is_failing = False
        return not self._is_failing


def best_effort(action: Callable[[], object], failure: str, work: str = "training") -> bool:
    """Run ``action``, which ``work`` does not depend on. Return whether it succeeded; if not, warn of ``failure``."""
    return BestEffort(failure, work)(action)
