"""A run that is killed, frozen and stopped ends with the bits of the one that nothing happened to."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import records_of, train_alone, wait_until
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


class Interrupted:
    """The run that every strike hits, and that goes on after each."""

    def __init__(self, launch: Launch, storage: Path, faults: Faults) -> None:
        self._launch, self.storage, self._faults = launch, storage, faults

    def strike(
        self, row: str, injected: str, harm: Callable[[Launched], None], *overrides: str, within_s: float
    ) -> Launched:
        with self._faults(row, f"torchrun: {injected}", f"gone in {within_s:g} s; its state is kept") as fault:
            run = under_way(self._launch, self.storage, *overrides)
            kept, struck = newest_step(self.storage), time.monotonic()
            harm(run)
            wait_until(lambda: not run.left(), within_s)
            (folder,) = self.storage.glob("runs/train/*")
            lost = records_of(folder)[-1]["step"] - newest_step(self.storage)
            fault.saw(f"gone after {time.monotonic() - struck:.1f} s, {lost} steps lost")
            assert newest_step(self.storage) >= kept
            assert lost < 2 * EVERY_STEPS, "the state before the last one is kept before the next one is"
            return run

    def require_the_bits_of(self, uninterrupted: Trained, after: str) -> None:
        """Let it come to its end."""
        stopped_at = newest_step(self.storage)
        with self._faults("T1", f"torchrun: {after} on one run", "ends with the same bits") as fault:
            result = train_alone(*INTERRUPTED, processes=2)
            assert result["metrics"]["resumed_from_step"] == stopped_at
            assert Trained.of(result) == uninterrupted
            fault.saw(f"weights, losses and all {len(uninterrupted.state)} tensors of the last checkpoint are the same")


@pytest.fixture
def interrupted(launch: Launch, tmp_path: Path, faults: Faults) -> Interrupted:
    return Interrupted(launch, tmp_path / "storage", faults)


def test_a_run_that_is_killed_ends_with_the_same_bits(interrupted: Interrupted, uninterrupted: Trained) -> None:
    killed = interrupted.strike("T1", "SIGKILL of a rank", kill_rank, within_s=10)
    assert killed.ends() != 0
    interrupted.require_the_bits_of(uninterrupted, "T1")


@pytest.mark.slow
def test_a_run_that_loses_its_launcher_and_whose_ranks_are_frozen_and_stopped_ends_with_the_same_bits(
    interrupted: Interrupted, uninterrupted: Trained
) -> None:
    interrupted.strike("T2", "SIGKILL of torchrun", kill_launcher, within_s=10)
    interrupted.strike("T10", "SIGSTOP of a rank", freeze_rank, IMPATIENT, within_s=HANG_TIMEOUT_S + 10)
    stopped = interrupted.strike("stop", "SIGTERM of torchrun", stop_launcher, within_s=30)
    assert stopped.result()["metrics"]["steps"] == newest_step(interrupted.storage)
    stopped = interrupted.strike("stop", "SIGTERM of a rank", stop_rank, within_s=30)
    assert (stopped.ends(), stopped.result()["status"]) == (0, "stopped")
    assert stopped.result()["metrics"]["steps"] == newest_step(interrupted.storage), "the state at the stop is kept"
    interrupted.require_the_bits_of(uninterrupted, "T2, T10 and two stops")


@pytest.mark.slow  # it times the recovery, so no other test may run beside it
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
