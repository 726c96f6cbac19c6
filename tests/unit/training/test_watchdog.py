"""The watchdog of one worker beside another's: which waiting is a hang, and whose fault it is."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from app.training.coordination import watchdog
from app.training.coordination.watchdog import Beat, Watchdog, blame
from app.training.worker import Worker
from tests.helpers import in_fork


def two_workers() -> None:
    # The clock stands still while the system does not run this process. Nodes do not share the clock of the day.
    clock_s = 0.0
    watchdog.time = SimpleNamespace(monotonic=lambda: clock_s)  # type: ignore[attr-defined]
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    waiting, storing = (Watchdog(Worker(rank, 2, torch.device("cpu")), 0.5, print) for rank in (0, 1))
    waiting.beat("the sync after step 9")
    storing.beat("the sync after step 9")
    waiting.beat("looking for a checkpoint")
    for _ in range(15):
        storing.report_progress()
        clock_s += 0.1
        time.sleep(0.1)
    storing.report_progress()
    print("lives", flush=True)
    if "ends" in sys.argv:
        storing.close()
    for _ in range(600):
        clock_s += 0.1
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("hangs", "rank 1 does not come out of the sync after step 9; the others wait"),
        ("ends", "rank 1 does not answer: stopped, or gone"),
    ],
)
def test_slow_storage_of_one_worker_is_no_hang_of_those_that_wait_and_becomes_one_when_it_stops(
    then: str, said: str
) -> None:
    ended = in_fork(f"{__name__}:two_workers", then)
    assert ended.stdout.startswith("lives\n")
    assert f"error: no progress for 0.5 s: {said}" in ended.stderr
    assert ended.returncode == 70


def beats(counts: list[int], waits: list[bool]) -> list[Beat]:
    return [
        Beat(rank=rank, count=count, doing=f"work {count}", is_waiting=wait, idle_s=9.0, number=1)
        for rank, (count, wait) in enumerate(zip(counts, waits, strict=True))
    ]


@pytest.mark.parametrize(
    ("counts", "waits", "said"),
    [
        ([5, 4, 5], [False, True, False], "rank 1 does not come out of work 4; the others wait"),
        ([5, 4, 4], [True, True, False], "rank 2 does not come out of work 4; the others wait"),
        ([4, 4, 4], [False, True, False], "ranks 0, 2 do not come out of work 4; the others wait"),
        ([4, 4, 4], [True, True, True], "all ranks wait for each other in work 4: one may have skipped a collective"),
        ([4, 4, 4], [False, False, False], "no rank comes out of work 4"),
    ],
)
def test_who_is_behind_and_waits_for_nobody_is_named(counts: list[int], waits: list[bool], said: str) -> None:
    assert blame(beats(counts, waits)).startswith(said)
