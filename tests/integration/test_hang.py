"""A rank that hangs ends the run and is named; one that is slow is only named."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.helpers import in_fork, records_of, run, wait_until, write_sums
from tests.launch import Launch, newest_step
from tests.tables import Faults

pytestmark = pytest.mark.faults
TIMEOUT_S = 10.0
KEYS = ["train.epochs=9", "train.early_stopping=null", f"train.hang_timeout_s={TIMEOUT_S}"]
RUN = ["recipes/digits.yaml", *KEYS]


def failure_of(storage: Path) -> str:
    """What a rank noted before it ended itself."""
    wait_until(lambda: any(storage.glob("runs/train/*/failure.txt")))
    (note,) = storage.glob("runs/train/*/failure.txt")
    return note.read_text(encoding="utf-8")


def test_a_stage_that_sleeps_is_named_and_so_is_what_all_wait_in_after_one_has_skipped_an_exchange(
    tmp_path: Path, faults: Faults
) -> None:
    elsewhere, pool = tmp_path / "elsewhere", ThreadPoolExecutor(2)
    train = partial(pool.submit, in_fork, "app.training", processes=2, timeout=300)
    with faults(
        "T10", "torchrun: a pipeline's stage sleeps in its step", f"error in {TIMEOUT_S + 10:g} s, names the rank"
    ) as fault:
        once = tmp_path / "once"
        run = train(
            *("recipes/stdlib_gpt.yaml", *KEYS),
            *(f"data.source={write_sums(tmp_path / 'corpus')}", "data.tokenizer={kind: bytes}"),
            *("data.block_length=32", "train.plan={pipeline: 2}", "model.factory=tests.faults.models:hanging_gpt"),
            f"model.args={{rank: 1, call: 30, once: {once}}}",
        )
        wait_until(lambda: once.exists() or run.done(), timeout_s=300)
        skipping = train(
            *RUN,
            f"storage={elsewhere}",
            "model.factory=tests.faults.models:SkippingCnn",
            "model.args={width: 32, rank: 1, call: 30}",
        )
        done = run.result()
        assert done.returncode != 0, done.stdout
        seconds = time.time() - once.stat().st_mtime
        fault.saw(f"{failure_of(tmp_path / 'storage')}; ended after {seconds:.1f} s")
        expected = f"no progress for {TIMEOUT_S:g} s: rank 1 does not come out of the pipeline's step; the others wait"
        assert failure_of(tmp_path / "storage") == expected
        assert "in trouble" in done.stderr, "its stack is shown"
        assert seconds <= TIMEOUT_S + 10
        assert newest_step(tmp_path / "storage") > 0
    with faults("T10", "torchrun: a rank skips an all-reduce", f"error in {TIMEOUT_S + 10:g} s, says where") as fault:
        assert skipping.result().returncode != 0
        (folder,) = elsewhere.glob("runs/train/*")
        seconds = (folder / "failure.txt").stat().st_mtime - (folder / "metrics.jsonl").stat().st_mtime
        fault.saw(f"{failure_of(elsewhere)}; after {seconds:.1f} s")
        waits = "all ranks wait for each other in the forward pass: one may have skipped a collective"
        assert failure_of(elsewhere) == f"no progress for {TIMEOUT_S:g} s: {waits}"
        assert seconds <= TIMEOUT_S + 10


@pytest.mark.slow
def test_a_slow_rank_is_named_and_a_first_rank_that_is_frozen_ends_the_run(
    launch: Launch, tmp_path: Path, faults: Faults
) -> None:
    storage = tmp_path / "storage"
    slow = ["model.factory=tests.faults.models:SlowCnn", "model.args={width: 32, rank: 1, extra_s: 0.5}"]
    run = launch.torchrun("-m", "app.training", *RUN, *slow)
    with faults("T11", "torchrun: 0.5 s more a step", "named within 20 steps, not killed") as fault:
        run.says("warning: rank 1 is slow")
        (folder,) = storage.glob("runs/train/*")
        named_at = len(records_of(folder))
        run.says("epoch 1/9")
        fault.saw(f"named at step {named_at}")
        assert named_at <= 20
        assert "rank 0 is slow" not in run.output
    with faults("T10", "torchrun: SIGSTOP of rank 0", f"error in {TIMEOUT_S + 10:g} s, names the rank") as fault:
        frozen, struck = run.ranks()[0], time.monotonic()
        os.kill(frozen, signal.SIGSTOP)
        run.says("rank 0 does not answer: stopped, or gone", TIMEOUT_S + 10)
        fault.saw(f"{failure_of(storage)}; after {time.monotonic() - struck:.1f} s")
        os.kill(frozen, signal.SIGKILL)  # torchrun would do so after half a minute
        assert run.ends() != 0


WAITING = """
import time, torch
from app.training.coordination.watchdog import Watchdog
from app.training.worker import Worker
watchdog = Watchdog(Worker(0, 1, torch.device("cpu")), 1.0, print)
with watchdog.rest():
    time.sleep(2.5)
watchdog.close()
"""


def test_a_single_worker_may_wait_for_whoever_hears_its_report() -> None:
    waited = run("python", "-c", WAITING)
    assert (waited.returncode, waited.stdout, waited.stderr) == (0, "", "")
