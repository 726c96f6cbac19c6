"""What several tests do: run a command, read its result."""

import asyncio
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec

from upath import UPath

from app.ports import unused
from tests.forks import TRAINING, Command, Forks

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
CLUSTER = "cluster"
"""Name of the fixture and of the xdist group of its tests, which share one process and one cluster."""

Arguments = ParamSpec("Arguments")


def on_loop(test: Callable[Arguments, Coroutine[Any, Any, None]]) -> Callable[Arguments, None]:
    """Run a test that is a coroutine on an event loop of its own."""

    @functools.wraps(test)
    def run_test(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run_test


def run(
    *command: str, environment: dict[str, str] | None = None, timeout: float = 300, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a command of this environment, in the checkout unless told otherwise; its output is captured."""
    return subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        cwd=folder,
        env=_extended(environment),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def _extended(environment: dict[str, str] | None) -> dict[str, str]:
    return {**os.environ, **(environment or {}), "PATH": f"{BIN}:{os.environ['PATH']}"}


@contextmanager
def local_cluster(home: Path, *options: str, **settings: str) -> Iterator[dict[str, str]]:
    """Start a cluster with its state, storage and cache in ``home``; yield the environment for its clients.

    ``options`` are passed to ``rayloom up``. ``settings`` are environment variables, and can override these folders.
    The ports are random: two clusters that start at once could both take the default ones.
    """
    folders = {"HOME": home, "STORAGE": home / "storage", "CACHE": home / "cache"}
    environment = {f"RAYLOOM_{name}": str(folder) for name, folder in folders.items()} | settings
    names = ("--dashboard-port", "--serve-port", "--grpc-port")
    ports = [f"{name}={port}" for name, port in zip(names, unused(len(names)), strict=True)]
    with _taken_down(environment):
        started = run("rayloom", "up", *ports, *options, environment=environment)
        assert started.returncode == 0, started.stderr
        exports = run("rayloom", "env", environment=environment).stdout.splitlines()
        yield environment | dict(line.removeprefix("export ").split("=", 1) for line in exports)


@contextmanager
def _taken_down(environment: dict[str, str]) -> Iterator[None]:
    """Run ``rayloom down`` on exit, even if this process is killed.

    A child process runs it when its input ends.
    """
    child = subprocess.Popen(
        ["sh", "-c", 'read -r line; exec "$0" down', str(BIN / "rayloom")],
        cwd=ROOT,
        env=_extended(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C must not reach it
    )
    try:
        yield
    finally:
        _, errors = child.communicate("\n", timeout=300)
    assert child.returncode == 0, errors


SGD = ["train.optimizer={name: sgd, lr: 0.1, momentum: 0.9}", "train.max_steps=20"]


def documented(page: str, **names: Any) -> dict[str, Any]:
    """What the first Python of a page in ``docs`` defines; ``names`` is what it takes for granted."""
    code = (ROOT / "docs" / page).read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    exec(code, names)
    return names


def result_line(output: str) -> dict[str, Any]:
    """The RESULT that a job has printed."""
    lines = {line for line in output.splitlines() if line.startswith("RESULT ")}  # Ray shows that of a failed job twice
    assert len(lines) == 1, output
    line: dict[str, Any] = json.loads(lines.pop().removeprefix("RESULT "))
    return line


def result_of(output: str) -> dict[str, Any]:
    """The whole result of a job, from the file that its RESULT names."""
    line = result_line(output)
    if "result" not in line:
        return line
    whole: dict[str, Any] = json.loads(UPath(line["result"]).read_text(encoding="utf-8"))
    return whole


def submit(cluster: dict[str, str], job: str, *arguments: str, succeeds: bool = True) -> dict[str, Any]:
    """Plain 'ray job submit', as the README shows it; its result."""
    command = ["ray", "job", "submit", "--working-dir", ".", "--", "python", "-m", f"jobs.{job}", *arguments]
    done = run(*command, environment=cluster)
    assert (done.returncode == 0) is succeeds, done.stdout + done.stderr
    return result_of(done.stdout.partition("Status message:")[0])  # Ray prints the log of a failed job once more


def folder_of(result: dict[str, Any]) -> Path:
    """Of a run that has succeeded."""
    return Path(result["artifacts"]["weights"]).parent


def records_of(run_folder: Path) -> list[dict[str, Any]]:
    """What a run has logged."""
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def steps_of(run_folder: Path) -> list[dict[str, Any]]:
    """What it has logged of each step."""
    return [record for record in records_of(run_folder) if "loss" in record]


def losses(result: dict[str, Any]) -> list[float]:
    return [step["loss"] for step in steps_of(folder_of(result))]


def flip(file: Path) -> None:
    """Change one bit of it."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def write_sums(folder: Path) -> Path:
    """A corpus with a rule that a small model can learn: files of sums."""
    folder.mkdir(exist_ok=True)
    for first in range(30):
        lines = [f"{first} + {second} = {first + second}\n" for second in range(50)]
        (folder / f"{first}.txt").write_text("".join(lines), encoding="utf-8")
    return folder


@cache
def _commands(home: str) -> Forks:
    """Return the fork server for the commands of a ``RAYLOOM_HOME``, which is read once, on import."""
    return Forks({**os.environ, "RAYLOOM_HOME": home}, ["app.cli.main", "app.cli.models", "s3fs"])


def rayloom(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``rayloom ARGUMENT…`` in the checkout, in a fork of a process that has imported its modules.

    ``run`` starts the installed command, which takes a second longer.
    """
    given = _extended(environment)
    commands = _commands(given.get("RAYLOOM_HOME", "~/.rayloom"))
    return commands.run(Command("app.cli.main:main", list(arguments), given), timeout_s=120)


@cache
def _trainings() -> Forks:
    return Forks({**os.environ, "DS_ACCELERATOR": "cpu"}, TRAINING)


def in_fork(
    module: str, *arguments: str, environment: dict[str, str] | None = None, processes: int = 0, timeout: float = 900
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m MODULE ARGUMENT…`` in a fork of a process that has imported the training modules."""
    command = Command(module, list(arguments), {**os.environ, **(environment or {})}, processes)
    return _trainings().run(command, timeout)


def latest(overrides: Iterable[str]) -> list[str]:
    """The overrides that count: a command line sets a key once, and tests change some of what they share."""
    kept: dict[str, str] = {}
    for override in overrides:
        key = override.partition("=")[0]
        kept = {other: given for other, given in kept.items() if not f"{other}.".startswith(f"{key}.")}
        kept[key] = override
    return list(kept.values())


def train_alone(*overrides: str, processes: int = 1, recipe: str = "recipes/digits.yaml") -> dict[str, Any]:
    """Train without Ray and return the result. To watch or kill the processes, use ``Launch.torchrun`` instead."""
    done = in_fork("app.training", recipe, *latest(overrides), processes=processes, timeout=300)
    assert done.returncode == 0, done.stderr
    return result_of(done.stdout)


def wait_until(condition: Callable[[], bool], timeout_s: float = 180.0) -> None:
    """Wait for a condition. The time is what a busy machine may need, not what anything should take."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.01)
