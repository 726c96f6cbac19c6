"""Workers that wait while the first one prepares: longer than any timeout, but not for a dead one."""

import os
import signal
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from subprocess import CompletedProcess

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from app.training.coordination import preparing as waiting
from app.training.worker import Worker
from tests.helpers import in_fork


def worker() -> None:
    """Prepare as rank 0, or wait as rank 1. The store of the test has the pid, and the word to go on."""
    rank, port, then = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    waiting._INTERVAL_S, waiting._MAX_SILENCE_S = 0.1, 3.0
    store = TCPStore("127.0.0.1", port, is_master=False)
    waiting.default_store = lambda: store  # type: ignore[assignment]
    this = Worker(rank, 2, torch.device("cpu"))
    if rank:
        store.set("waits", "")
        waiting.wait_for_first(this)
        print("went on")
        return
    try:
        with waiting.preparing(this):
            store.set("prepares", str(os.getpid()))
            store.wait(["go on"])
            if then == "fails":
                raise ValueError
    except ValueError:
        pass


@pytest.mark.parametrize("then", ["succeeds", pytest.param("fails", marks=pytest.mark.slow), "dies"])
def test_the_others_wait_for_a_first_worker_that_lives(then: str) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's agent has it, too
    with ThreadPoolExecutor(2) as pool:

        def start(rank: int, says: str) -> Future[CompletedProcess[str]]:
            running = pool.submit(in_fork, f"{__name__}:worker", str(rank), str(store.port), then)
            store.wait([says])
            return running

        first, other = start(0, "prepares"), start(1, "waits")
        if then == "dies":
            os.kill(int(store.get("prepares")), signal.SIGKILL)
            assert "rank 0 sent no heartbeat for 3 s while it prepared the data" in other.result(60).stderr
            return
        with pytest.raises(TimeoutError):
            other.result(3.5)  # longer than a silence may last
        store.set("go on", "")
        assert first.result(60).returncode == 0
        assert other.result(60).stdout == "went on\n"
