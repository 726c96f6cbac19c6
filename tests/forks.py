"""python -m tests.forks FD: run commands in forks of one process, which has loaded what they take longest to load.

A fork runs a command as a new interpreter would: with arguments, environment, folder and output of its own.
"""

import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

ROOT = Path(__file__).parents[1]
_HERE = "127.0.0.1"
TRAINING = [
    *("app.training.__main__", "deepspeed", "deepspeed.ops"),
    *("deepspeed.runtime.zero.muon.muon_optimizer", "sklearn.datasets", "tensorboardX", "torch._dynamo"),
]  # what would else be loaded late, by a model or an optimizer, too
JOBS = [*TRAINING, "jobs.tune", "jobs.deploy", "transformers", "onnxscript"]
"""Without ONNX Runtime: it starts a thread when it is loaded, which a fork does not have and waits for at its end."""
_LONGEST_MESSAGE = 2**17
T = TypeVar("T")


@dataclass(frozen=True)
class Command:
    """``python -m MODULE ARGUMENT…``, in so many processes as torchrun would start; 0 for one without torchrun."""

    module: str
    """Or ``module:function``, as the script of a package calls it."""
    arguments: list[str]
    environment: dict[str, str]
    processes: int = 0

    def run(self) -> None:
        """Do in this process what it says; raises SystemExit unless it succeeds."""
        os.environ.clear()
        os.environ.update(self.environment)
        if self.processes:
            run_ranks(self.processes, run_module, self.module, self.arguments)
        else:
            run_module(self.module, self.arguments)


def run_module(module: str, arguments: Sequence[str]) -> None:
    """As ``python -m`` does; raises SystemExit unless it succeeds."""
    sys.argv = [module, *arguments]
    name, _, function = module.partition(":")
    try:
        if function:
            getattr(importlib.import_module(name), function)()
        else:
            for loaded in (name, f"{name}.__main__"):
                sys.modules.pop(loaded, None)  # it is run, not imported
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise


def run_ranks(processes: int, work: Callable[..., T], *arguments: Any) -> T:
    """What the first of so many ranks returns; they are forks of this process.

    Where to meet is a number, not a name: one that is forked while a thread looks up a name waits for ever when it
    looks up one itself.
    """
    config = LaunchConfig(
        *(1, 1, processes),
        run_id="tests",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{_HERE}:0",
        local_addr=_HERE,
        start_method="fork",
    )
    first: T = elastic_launch(config, work)(*arguments)[0]
    return first


class Forks:
    """The process that is forked. What it loads sees the environment that it is started with."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", "tests.forks", str(theirs.fileno()), *modules],
                cwd=ROOT,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def run(self, command: Command, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Its exit status and output."""
        told, status = os.pipe()
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors, os.fdopen(told) as told_by:
            message = json.dumps(asdict(command)).encode()
            socket.send_fds(self._requests, [message], [output.fileno(), errors.fileno(), status])
            os.close(status)
            pid = int(told_by.readline())
            if not select.select([told_by], [], [], timeout_s)[0]:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(command.module, timeout_s)
            code = int(told_by.readline())
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(command.arguments, code, output.read(), errors.read())


def _next_command(requests: socket.socket) -> Command | None:
    """Returns in a fork for each command, and, when no more are wanted, in this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _LONGEST_MESSAGE, 3)
        if not message:
            return None
        if not os.fork():
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _watch_fork(*descriptors)
            return Command(**json.loads(message))
        for descriptor in descriptors:
            os.close(descriptor)


def _watch_fork(output: int, errors: int, status: int) -> None:
    """Return in one more fork, with this output; tell its pid and how it ended, then end."""
    pid = os.fork()
    if pid:
        os.write(status, f"{pid}\n".encode())
        _, ended = os.waitpid(pid, 0)
        os.write(status, f"{os.waitstatus_to_exitcode(ended)}\n".encode())
        os._exit(0)
    os.close(status)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(errors, sys.stderr.fileno())
    os.close(output)
    os.close(errors)


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in sys.argv[2:]:
            importlib.import_module(module)
    if command := _next_command(requests):
        command.run()


if __name__ == "__main__":
    main()
