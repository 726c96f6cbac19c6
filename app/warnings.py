"""What goes wrong beside the work: it is said, and the work goes on."""

import sys
from collections.abc import Callable


def warn(message: str) -> None:
    """Print a warning where a person reads it."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def attempt(action: Callable[[], object], failure: str) -> bool:
    """Run ``action``, without which training can go on, and say whether it succeeded; if not, warn of ``failure``."""
    try:
        action()
    except Exception as error:  # of torch, of the GPU's profiling library, of storage's driver
        warn(f"{failure} ({type(error).__name__}: {error}); training goes on")
        return False
    return True
