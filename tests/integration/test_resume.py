"""A run that is killed, frozen and stopped ends with the bits of the one that nothing happened to."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import records_of, wait_until
from tests.launch import (
    EVERY_STEPS,
    HANG_TIMEOUT_S,
    IMPATIENT,
    INTERRUPTED,
    STEPS,
    Cluster,
    Job,
    Launch,
    Launched,
    Trained,
    newest_step,
)
from tests.tables import Faults

pytestmark = pytest.mark.faults


def under_way(launch: Launch, storage: Path, *overrides: str) -> Launched:
    """The run, going on from where it stood, a random while after it has kept its state once more."""
    before = newest_step(storage)
    run = launch.torchrun("-m", "app.training", "recipes/digits.yaml", *INTERRUPTED, *overrides)
    wait_until(lambda: newest_step(storage) > before + EVERY_STEPS or run.process.poll() is not None, timeout_s=300)
    assert f"going on from step {before} of {STEPS}" in run.output or not before, run.output
    time.sleep(random.uniform(0.0, 0.5))
    return run


def kill_rank(run: Launched) -> None:
    os.kill(run.ranks()[1], signal.SIGKILL)


def freeze_rank(run: Launched) -> None:
    rank = run.ranks()[1]
    os.kill(rank, signal.SIGSTOP)
    run.says(f"no progress for {HANG_TIMEOUT_S:g} s: rank 1 does not answer: stopped, or gone", HANG_TIMEOUT_S + 10)
    os.kill(rank, signal.SIGKILL)  # torchrun would do so after half a minute


def kill_launcher(run: Launched) -> None:
    os.kill(run.pid, signal.SIGKILL)


def stop_rank(run: Launched) -> None:
    os.kill(run.ranks()[1], signal.SIGTERM)


def stop_launcher(run: Launched) -> None:
    os.kill(run.pid, signal.SIGTERM)


def test_an_interrupted_run_ends_with_the_same_bits(
    launch: Launch, tmp_path: Path, uninterrupted: Trained, faults: Faults
) -> None:
    storage = tmp_path / "storage"

    def strike(row: str, injected: str, harm: Callable[[Launched], None], *overrides: str, within_s: float) -> Launched:
        with faults(row, f"torchrun: {injected}", f"gone in {within_s:g} s; its state is kept") as fault:
            run = under_way(launch, storage, *overrides)
            kept, struck = newest_step(storage), time.monotonic()
            harm(run)
            wait_until(lambda: not run.left(), within_s)
            (folder,) = storage.glob("runs/train/*")
            lost = records_of(folder)[-1]["step"] - newest_step(storage)
            fault.saw(f"gone after {time.monotonic() - struck:.1f} s, {lost} steps lost")
            assert newest_step(storage) >= kept
            assert lost < 2 * EVERY_STEPS, "the state before the last one is kept before the next one is"
            return run

    killed = strike("T1", "SIGKILL of a rank", kill_rank, within_s=10)
    assert killed.ends() != 0
    strike("T2", "SIGKILL of torchrun", kill_launcher, within_s=10)
    strike("T10", "SIGSTOP of a rank", freeze_rank, IMPATIENT, within_s=HANG_TIMEOUT_S + 10)
    stopped = strike("stop", "SIGTERM of a rank", stop_rank, within_s=30)
    assert (stopped.ends(), stopped.result()["status"]) == (0, "stopped")
    assert stopped.result()["metrics"]["steps"] == newest_step(storage), "the state at the stop is kept"
    stopped = strike("stop", "SIGTERM of torchrun", stop_launcher, within_s=30)
    assert stopped.result()["metrics"]["steps"] == newest_step(storage)

    with faults("T1", "torchrun: all of T1, T2, T10 and stop on one run", "ends with the same bits") as fault:
        result = launch.torchrun("-m", "app.training", "recipes/digits.yaml", *INTERRUPTED).result()
        assert result["metrics"]["resumed_from_step"] == stopped.result()["metrics"]["steps"]
        assert Trained.of(result) == uninterrupted
        fault.saw(f"weights, losses and all {len(uninterrupted.state)} tensors of the last checkpoint are the same")


def test_ray_starts_the_workers_again(
    cluster: dict[str, str], launch: Launch, tmp_path: Path, uninterrupted: Trained, faults: Faults
) -> None:
    with faults("T1", "Ray: SIGKILL of a worker that reads ahead", "trains on in 30 s; the same bits") as fault:
        storage = Path(cluster["RAYLOOM_STORAGE"])
        ahead = "train.loader.num_workers=2"
        job = Job(Cluster(cluster), launch, "killed", *INTERRUPTED, ahead, f"model.args.ranks={tmp_path}")
        wait_until(lambda: newest_step(storage, "killed") > EVERY_STEPS or job.has_ended, timeout_s=300)
        victim, struck = tmp_path / "1", time.time()
        os.kill(int(victim.read_text(encoding="utf-8")), signal.SIGKILL)
        result = job.client.result()
        recovery_s = victim.stat().st_mtime - struck
        fault.saw(f"trains on after {recovery_s:.1f} s")
        assert Trained.of(result) == uninterrupted
        # Ray shows a line once for every node that there ever was on this machine.
        assert len({line for line in job.output.splitlines() if "going on from step" in line}) == 1
        assert result["metrics"]["resumed_from_step"] >= EVERY_STEPS
        assert recovery_s <= 30
        wait_until(Cluster(cluster).is_idle)
