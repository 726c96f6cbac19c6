"""A local Ray cluster for what is measured as a job."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path(__file__).parents[1]


@contextmanager
def local_cluster() -> Iterator[Mapping[str, str]]:
    """A cluster with a home of its own, taken down however this ends; its value is the environment that reaches it."""
    with tempfile.TemporaryDirectory(prefix="bench-cluster-") as home, _ends_on_sigterm():
        environment = {**os.environ, "RAYLOOM_HOME": home, "RAYLOOM_STORAGE": f"{home}/storage", "OMP_NUM_THREADS": "1"}
        try:
            rayloom(["up"], environment)
            yield environment
        finally:
            rayloom(["down"], environment)


@contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit, as Ctrl-C raises KeyboardInterrupt, so that nothing is left behind."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def rayloom(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The lines that a command of Rayloom's printed, shown as they come. Raises RuntimeError if it fails."""
    command = [str(Path(sys.executable).with_name("rayloom")), *words]
    lines = []
    with subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        raise RuntimeError(f"'rayloom {' '.join(words)}' ended with {process.returncode}: what it says is above")
    return lines
