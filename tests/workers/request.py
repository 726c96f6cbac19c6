"""What a process asks for that Ray starts as a worker. It imports little, so it starts quickly."""

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

MODULES = [
    *("aiohttp", "deepspeed", "deepspeed.ops", "deepspeed.runtime.zero.muon.muon_optimizer", "fastapi", "grpc"),
    *("httpx", "onnx", "opentelemetry.sdk.metrics", "optuna", "pandas", "PIL.Image", "plotly.graph_objects"),
    *("pyarrow.fs", "requests", "sklearn.datasets", "tensorboardX", "tokenizers", "torch._dynamo", "upath", "uvicorn"),
]
"""Modules that many workers need. Ray is left out, since it reads the job of a worker from the environment on import,
and so are the modules of this repository, which a worker imports from the folder that its job was sent with."""
_PERIOD_S = 0.01


def be_forked(arguments: Sequence[str]) -> None:
    """Let a fork be the worker that this process was started as, and wait for the fork's end."""
    address = os.environ["RAYLOOM_TEST_WORKERS"]
    reader, status = os.pipe()
    module = "tests.workers.worker:main"
    command = {"module": module, "arguments": list(arguments), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as requests:
        _connect(requests, address)
        socket.send_fds(requests, [json.dumps(command).encode()], [1, 2, status])
    os.close(status)
    with os.fdopen(reader) as replies:
        replies.read()


def _connect(requests: socket.socket, address: str) -> None:
    """Connect to the parent process of the forks, which the first worker of a cluster starts in its own environment.

    A message may be sent before the parent has imported its modules. Raises RuntimeError if the parent does not start.
    """
    with Path(f"{address}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):
            return requests.connect(address)
        with Path(f"{address}.log").open("w") as log:
            command = [sys.executable, "-m", "tests.forks", address, *MODULES]
            parent = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        while parent.poll() is None:
            with contextlib.suppress(OSError):
                return requests.connect(address)
            time.sleep(_PERIOD_S)
        raise RuntimeError(f"no worker can be forked: see {log.name}")
