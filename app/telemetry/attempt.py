"""Telemetry looks on: what fails in it becomes a warning, never an end of training."""

import sys
from collections.abc import Callable


def attempt(action: Callable[[], object], failure: str) -> bool:
    """Run ``action``, and say whether it succeeded; if it raised, print ``failure`` and why."""
    try:
        action()
    except Exception as error:  # of torch, of the GPU's profiling library, of storage's driver
        warn(f"{failure} ({type(error).__name__}: {error}); training goes on")
        return False
    return True


def warn(message: str) -> None:
    """Print a warning where a person reads it."""
    print(f"warning: {message}", file=sys.stderr, flush=True)
