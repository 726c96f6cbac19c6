"""python -m tests.forks FD|PATH MODULE…: run commands in forks of a process that has already imported slow modules.

A fork runs a command as a new interpreter would, with its own arguments, environment, folder and output.
"""

import gc
import importlib
import json
import os
import runpy
import secrets
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
    *("app.training.__main__", "app.data.preparation.data", "app.data.tabular", "app.data.text", "app.models.image"),
    *("app.tasks.classification", "app.tasks.judgement.examples", "app.tasks.judgement.linear"),
    *("app.training.checkpoints.part_reader", "deepspeed", "deepspeed.module_inject", "deepspeed.ops"),
    *("deepspeed.module_inject.auto_ep_layer", "deepspeed.ops.op_builder.all_ops"),
    *("deepspeed.runtime.zero.muon.muon_optimizer", "PIL.PngImagePlugin", "pyarrow.pandas_compat", "setuptools"),
    *("sklearn.datasets", "sklearn.linear_model", "sklearn.metrics", "sklearn.model_selection", "sklearn.svm"),
    *("tensorboardX", "torch._dynamo", "torch.distributed.checkpoint", "upath.implementations.local"),
    *("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"),
    "transformers.models.llama.modeling_llama",
]  # includes modules that models and optimizers would import late
JOBS = [*TRAINING, "jobs.tune", "jobs.deploy", "transformers", "onnxscript"]
"""ONNX Runtime is left out: it starts a thread on import. A fork lacks this thread and would wait for it on exit."""
_LONGEST_MESSAGE = 2**17
_MAX_DRAWS = 2**14
T = TypeVar("T")


@dataclass(frozen=True)
class Command:
    """``python -m MODULE ARGUMENT…``, run in ``processes`` ranks as by torchrun; with 0, in one process without it."""

    module: str
    """A module, or ``module:function`` as in a package's entry point."""
    arguments: list[str]
    environment: dict[str, str]
    processes: int = 0

    def run(self) -> None:
        """Run the command in this process. Raises SystemExit if it fails."""
        os.environ.clear()
        os.environ.update(self.environment)
        if self.processes:
            run_ranks(self.processes, run_module, self.module, self.arguments)
        else:
            run_module(self.module, self.arguments)


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Run a module as ``python -m`` does. Raises SystemExit if it fails."""
    sys.argv = [module, *arguments]
    name, _, function = module.partition(":")
    try:
        if function:
            getattr(importlib.import_module(name), function)()
        else:
            for loaded in (name, f"{name}.__main__"):
                sys.modules.pop(loaded, None)  # so that runpy runs it afresh
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise


def run_ranks(processes: int, work: Callable[..., T], *arguments: Any) -> T:
    """Run ``work`` in ``processes`` ranks, forked from this process, and return the result of the first.

    The rendezvous address is an IP address, not a host name. A process that is forked while a thread resolves a name
    hangs when it resolves one itself.
    """
    config = LaunchConfig(
        *(1, 1, processes),
        run_id="tests",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{_HERE}:0",
        local_addr=_HERE,
        start_method="fork",
        max_restarts=0,  # as in torchrun
        shutdown_timeout=5,  # a rank that hangs does not end by itself
    )
    gc.freeze()  # otherwise each collection in a rank visits, and so copies, everything that this process has imported
    first: T = elastic_launch(config, work)(*arguments)[0]
    return first


class Forks:
    """The parent process of the forks. Its modules are imported in the environment that it is started with."""

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
        """Run ``command`` in a fork, and return its exit status and output."""
        reader, status = os.pipe()
        with (
            tempfile.TemporaryFile("w+") as output,
            tempfile.TemporaryFile("w+") as errors,
            os.fdopen(reader) as replies,
        ):
            message = json.dumps(asdict(command)).encode()
            socket.send_fds(self._requests, [message], [output.fileno(), errors.fileno(), status])
            os.close(status)
            pid = int(replies.readline())
            if not select.select([replies], [], [], timeout_s)[0]:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(command.module, timeout_s)
            code = int(replies.readline())
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(command.arguments, code, output.read(), errors.read())


def _next_command(requests: socket.socket) -> Command | None:
    """Fork for each command. Return the command in each fork; in this process, return None after the last one."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the watching forks are reaped automatically
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _LONGEST_MESSAGE, 3)
        if not message:
            return None
        if not os.fork():
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _watch_fork(*descriptors)
            _move_ray_generator()
            return Command(**json.loads(message))
        for descriptor in descriptors:
            os.close(descriptor)


def _move_ray_generator() -> None:
    """Draw a random number of Ray's random IDs, if Ray has been imported.

    A fork has its parent's generator. Two drivers that start at the same time would create an object with the same ID,
    and the second one aborts ("Seal() called on an object without a reference to it").
    """
    if ray := sys.modules.get("ray"):
        for _ in range(secrets.randbelow(_MAX_DRAWS)):
            ray.TaskID.for_fake_task(ray.JobID.from_int(1))


def _watch_fork(output: int, errors: int, status: int) -> None:
    """Fork again and return in the child, with redirected output. The parent reports its pid and status, then exits."""
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


def _requests_at(place: str) -> socket.socket:
    """Return the socket with this file descriptor, or a new one bound to this path."""
    if place.isdecimal():
        return socket.socket(fileno=int(place))
    requests = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    Path(place).unlink(missing_ok=True)  # left by a process that was killed
    requests.bind(place)
    return requests


def main() -> None:
    requests = _requests_at(sys.argv[1])
    gc.disable()  # a fifth of the time of the imports
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in sys.argv[2:]:
            importlib.import_module(module)
    gc.freeze()  # see run_ranks
    gc.enable()
    if command := _next_command(requests):
        command.run()


if __name__ == "__main__":
    main()
