"""Workers that wait while the first one prepares: longer than any timeout, but not for a dead one."""

import os
import signal
import subprocess
import sys

import pytest

WORKER = """
import sys
import torch
from torch import distributed
from app.training.coordination import preparing as waiting
from app.training.worker import Worker

rank, port, then = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
waiting._INTERVAL_S, waiting._MAX_SILENCE_S = 0.1, 3.0
store = distributed.TCPStore("127.0.0.1", port, is_master=False)
waiting.default_store = lambda: store
worker = Worker(rank, 2, torch.device("cpu"))
if rank:
    print("waits", flush=True)
    waiting.wait_for_first(worker)
    print("went on", flush=True)
else:
    try:
        with waiting.preparing(worker):
            print("prepares", flush=True)
            sys.stdin.readline()
            if then == "fails":
                raise ValueError
    except ValueError:
        pass
"""


@pytest.mark.parametrize("then", ["succeeds", pytest.param("fails", marks=pytest.mark.slow), "dies"])
def test_the_others_wait_for_a_first_worker_that_lives(then: str) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's agent has it, too
    workers: list[subprocess.Popen[str]] = []

    def start(rank: int, says: str) -> subprocess.Popen[str]:
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(store.port), then],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        workers.append(worker)
        assert worker.stdout is not None
        assert worker.stdout.readline() == says
        return worker

    try:
        first = start(0, "prepares\n")
        other = start(1, "waits\n")
        if then == "dies":
            os.kill(first.pid, signal.SIGKILL)
            _, errors = other.communicate(timeout=60)
            assert "rank 0 sent no heartbeat for 3 s while it prepared the data" in errors
            return
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(3.5)  # longer than a silence may last
        first.communicate("\n", timeout=60)
        output, _ = other.communicate(timeout=60)
        assert output == "went on\n"
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
