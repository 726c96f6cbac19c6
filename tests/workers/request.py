"""A worker process of Ray requests a fork. This module imports little, so that the process starts quickly."""

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
    *("httpx", "onnx", "opentelemetry.sdk.metrics", "optuna", "pandas", "PIL.Image"),
    *("pyarrow.fs", "requests", "sklearn.datasets", "tensorboardX", "tokenizers", "torch._dynamo", "upath", "uvicorn"),
]
"""Modules that many workers need. Ray is left out: on import it reads a worker's job from the environment. Modules of
this repository are left out too: a worker imports them from the folder that came with its job."""
_PERIOD_S = 0.01


def be_forked(arguments: Sequence[str]) -> None:
    """Run the worker in a fork instead of this process, and wait until the fork ends."""
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
    """Connect to the parent process of the forks. A cluster's first worker starts it, in that worker's environment.

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
