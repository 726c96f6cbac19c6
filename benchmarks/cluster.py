"""A local Ray cluster for what is measured as a job."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.process_state import sigterm_exits
from app.runs import Result

_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Submitted:
    """A job that has succeeded."""

    result: Result
    output: tuple[str, ...]
    """The lines that it printed."""


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up."""

    environment: Mapping[str, str]
    """The environment of a process that connects to the cluster."""

    def submit(self, job: str, recipe: str, *overrides: str) -> Submitted:
        """Run a job to its end; its lines are shown as they come. Raises RuntimeError if it fails."""
        output = _shown("rayloom", ["submit", job, recipe, *overrides], self.environment)
        return Submitted(Result.of_output("".join(output)), tuple(output))

    def run(self, module: str, *arguments: str) -> Submitted:
        """Run a module as a job on a copy of the checkout, as ``submit`` does with Rayloom's own."""
        exports = _shown("rayloom", ["env"], self.environment)
        addresses = dict(line.strip().removeprefix("export ").split("=", 1) for line in exports)
        command = ["job", "submit", "--working-dir", ".", "--", "python", "-m", module, *arguments]
        output = _shown("ray", command, {**self.environment, **addresses})
        return Submitted(Result.of_output("".join(output)), tuple(output))


@contextmanager
def local_cluster(*options: str) -> Iterator[Cluster]:
    """A cluster with a home of its own, taken down however this ends. ``options`` are those of ``rayloom up``."""
    with tempfile.TemporaryDirectory(prefix="bench-cluster-") as home, sigterm_exits():
        environment = {**os.environ, "RAYLOOM_HOME": home, "RAYLOOM_STORAGE": f"{home}/storage", "OMP_NUM_THREADS": "1"}
        try:
            _shown("rayloom", ["up", *options], environment)
            yield Cluster(environment)
        finally:
            _shown("rayloom", ["down"], environment)


def _shown(program: str, words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the lines that a program printed, shown as they come. Raises RuntimeError if it fails."""
    command = [str(Path(sys.executable).with_name(program)), *words]
    lines = []
    with subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
        except BaseException:
            process.terminate()  # else leaving waits until the job has ended
            raise
    if process.returncode:
        raise RuntimeError(f"'{program} {' '.join(words)}' ended with {process.returncode}: what it says is above")
    return lines
