"""State of this process that is changed within a block and restored after it."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


@contextmanager
def sigterm_calls(action: Callable[[], object]) -> Iterator[None]:
    """Call ``action`` on SIGTERM within the block, instead of ending the process."""
    before = signal.signal(signal.SIGTERM, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def sigterm_exits() -> AbstractContextManager[None]:
    """Raise SystemExit on SIGTERM within the block, so that blocks that clean up are left in order."""
    return sigterm_calls(lambda: sys.exit(128 + signal.SIGTERM))


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable within the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
