"""State of this process: what is changed within a block and restored after it, and what holds for its life."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


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


def spare_loopback() -> None:
    """Have this process, and those that it starts, reach this machine itself and not through a proxy.

    With ``HTTP_PROXY`` alone, a proxy would be asked for the cluster's own addresses.
    """
    spared = [entry for name in ("no_proxy", "NO_PROXY") for entry in os.environ.get(name, "").split(",") if entry]
    # A star means every host, but only if it is alone.
    hosts = ["*"] if "*" in map(str.strip, spared) else dict.fromkeys([*spared, *_LOOPBACK])
    # Programs read either of them, some the lower case first.
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)
