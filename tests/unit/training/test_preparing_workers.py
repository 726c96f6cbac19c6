"""Workers that wait while the first one prepares: longer than any timeout, but not for a dead one."""

import os
import signal
import subprocess
import sys

import pytest

WORKER = """
import os, sys, time
import torch
from torch import distributed
from app.training.coordination import preparing as waiting
from app.training.worker import Worker

rank, port, then = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
waiting._INTERVAL_S, waiting._MAX_SILENCE_S = 0.1, 1.5
store = distributed.TCPStore("127.0.0.1", port, is_master=False)
waiting.default_store = lambda: store
worker = Worker(rank, 2, torch.device("cpu"))
if rank:
    began = time.monotonic()
    print("waits", flush=True)
    waiting.wait_for_first(worker)
    print("went on", time.monotonic() - began > 1.5, flush=True)
else:
    try:
        with waiting.preparing(worker):
            print("prepares", flush=True)
            time.sleep(3.0 if then != "dies" else 60.0)
            if then == "fails":
                raise ValueError
    except ValueError:
        pass
"""


@pytest.mark.parametrize("then", ["succeeds", "fails", "dies"])
def test_the_others_wait_for_a_first_worker_that_lives(then: str) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's agent has it, too
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(store.port), then],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    first, other = workers
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "prepares\n"
        assert other.stdout is not None
        assert other.stdout.readline() == "waits\n"
        if then == "dies":
            os.kill(first.pid, signal.SIGKILL)
        output, errors = other.communicate(timeout=60)
        if then == "dies":
            assert "rank 0 sent no heartbeat for 2 s while it prepared the data" in errors
        else:
            assert output == "went on True\n"
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
