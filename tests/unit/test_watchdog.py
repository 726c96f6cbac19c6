"""The watchdog of one worker beside another's: which waiting is a hang."""

from tests.helpers import run

TWO_WORKERS = """
import os, sys, time
import torch
from torch import distributed
from app.training.coordination.watchdog import Watchdog
from app.training.worker import Worker

store = distributed.TCPStore("127.0.0.1", 0, is_master=True)
distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
waiting, storing = (Watchdog(Worker(rank, 2, torch.device("cpu")), 0.5, print) for rank in (0, 1))
waiting.beat("the exchange after step 9")
storing.beat("the exchange after step 9")
waiting.beat("looking for a checkpoint")
began = time.monotonic()
while time.monotonic() - began < 1.5:
    storing.advance()
    time.sleep(0.1)
print("lives", flush=True)
time.sleep(60.0)
"""


def test_slow_storage_of_one_worker_is_no_hang_of_those_that_wait_and_becomes_one_when_it_stops() -> None:
    ended = run("python", "-c", TWO_WORKERS)
    assert ended.stdout.startswith("lives\n")
    assert "error: no progress for 0.5 s: rank 1 does not come out of the exchange after step 9; the others wait" in (
        ended.stderr
    )
    assert ended.returncode == 70
