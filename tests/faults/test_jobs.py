"""Jobs of training whose processes are killed, frozen and stopped: each ends as if nothing had happened."""

import time
from pathlib import Path

import psutil

from tests.helpers import wait_until
from tests.launch import (
    EVERY_STEPS,
    HANG_TIMEOUT_S,
    IMPATIENT,
    INTERRUPTED,
    STEPS,
    Cluster,
    Job,
    Launch,
    Trained,
    newest_step,
)
from tests.tables import Faults

SAME = "the same bits"


def trains_on(job: Job, storage: Path, name: str) -> None:
    """Wait until the job has kept its state twice from now on."""
    before = newest_step(storage, name)
    wait_until(lambda: newest_step(storage, name) > before + EVERY_STEPS or job.has_ended, timeout_s=300)
    assert not job.has_ended, job.output


def test_workers_die_at_the_first_step_between_two_checkpoints_and_at_the_last_step(
    ray: Cluster, launch: Launch, tmp_path: Path, uninterrupted: Trained, faults: Faults
) -> None:
    deaths = [1, 2 * EVERY_STEPS + 3, STEPS - 2 * EVERY_STEPS]
    dying = [
        *INTERRUPTED,
        "train.checkpoint.background=false",
        "train.max_failures=2",
        "model.factory=tests.faults.models:DyingCnn",
        f"model.args.deaths={deaths}",
        f"model.args.folder={tmp_path}",
    ]
    with faults("T1", "Ray: a worker dies at step 1, 11, 88", f"on in 30 s; {EVERY_STEPS} steps lost; {SAME}") as fault:
        first = Job(ray, launch, "dying", *dying)
        failed = first.client.result()
        assert failed["status"] == "failed", "of three failures two are allowed"
        assert "training failed: rank 1 died" in failed["error"]
        again = Job(ray, launch, "dying", *dying)
        result = again.client.result()
        moments = (
            [(tmp_path / f"death_{life}").stat().st_mtime_ns / 1e9 for life in range(len(deaths))],
            [(tmp_path / f"life_{life}").stat().st_mtime_ns / 1e9 for life in range(1, len(deaths) + 1)],
        )
        recovery_s = [life - death for death, life in zip(*moments, strict=True)]
        fault.saw(f"on after {', '.join(f'{seconds:.1f}' for seconds in recovery_s[:2])} s; third: {failed['error']}")
        assert f"going on from step {2 * EVERY_STEPS} of {STEPS}" in first.output
        assert f"going on from step {STEPS - EVERY_STEPS} of {STEPS}" in again.output
        assert result["run_id"] == failed["run_id"]
        assert Trained.of(result) == uninterrupted
        assert max(recovery_s[:2]) <= 30
        wait_until(ray.is_idle)


def test_a_job_outlives_its_controller_its_driver_a_stop_and_a_frozen_worker(
    ray: Cluster, launch: Launch, tmp_path: Path, uninterrupted: Trained, faults: Faults
) -> None:
    storage, victim = Path(ray.environment["RAYLOOM_STORAGE"]), tmp_path / "1"

    def submit(*overrides: str) -> Job:
        slowly = "model.args.pause_s=0.4"  # 'ray job stop' takes seconds to start
        return Job(ray, launch, "hunted", *INTERRUPTED, *overrides, slowly, f"model.args.ranks={tmp_path}")

    with faults("T5", "Ray: SIGKILL of TrainController", "the job trains on in 90 s") as fault:
        job = submit()
        trains_on(job, storage, "hunted")
        (controller,) = ray.processes("TrainController")
        struck = time.time()
        controller.kill()
        job.client.says("warning: Ray's training controller is gone")
        wait_until(lambda: victim.stat().st_mtime > struck, timeout_s=90)
        fault.saw(f"trains on after {victim.stat().st_mtime - struck:.1f} s")
        assert victim.stat().st_mtime - struck <= 90
    with faults("T2", "Ray: SIGKILL of the driver", "workers gone in 10 s") as fault:
        trains_on(job, storage, "hunted")
        struck = time.time()
        job.driver().kill()
        wait_until(lambda: not ray.processes("RayTrainWorker"), timeout_s=10)
        fault.saw(f"workers gone after {time.time() - struck:.1f} s")
        assert job.client.ends() != 0
    with faults("stop", "Ray: ray job stop", "state kept, 'stopped'") as fault:
        job = submit()
        trains_on(job, storage, "hunted")
        struck = time.time()
        job.stop()
        stopped = job.client.result()
        fault.saw(f"ended after {time.time() - struck:.1f} s, at step {stopped['metrics']['steps']}")
        assert (stopped["status"], stopped["metrics"]["steps"]) == ("stopped", newest_step(storage, "hunted"))
    with faults(
        "T10", "Ray: SIGSTOP of a worker", f"trains on in {HANG_TIMEOUT_S + 60:g} s; after T5, T2 and stop {SAME}"
    ) as fault:
        job = submit(IMPATIENT)
        trains_on(job, storage, "hunted")
        frozen, struck = psutil.Process(int(victim.read_text(encoding="utf-8"))), time.time()
        frozen.suspend()
        wait_until(lambda: victim.stat().st_mtime > struck, timeout_s=HANG_TIMEOUT_S + 60)
        fault.saw(f"trains on after {victim.stat().st_mtime - struck:.1f} s")
        assert victim.stat().st_mtime - struck <= HANG_TIMEOUT_S + 60
        job.client.says("rank 1 does not answer: stopped, or gone")
        result = job.client.result()
        assert (result["run_id"], result["status"]) == (stopped["run_id"], "succeeded")
        assert Trained.of(result) == uninterrupted
        wait_until(ray.is_idle)


def test_a_worker_that_sleeps_is_named_and_started_again(
    ray: Cluster, launch: Launch, tmp_path: Path, uninterrupted: Trained, faults: Faults
) -> None:
    once, expected = tmp_path / "once", f"error in {HANG_TIMEOUT_S + 10:g} s, on in {HANG_TIMEOUT_S + 60:g} s; {SAME}"
    hanging = [
        *INTERRUPTED,
        IMPATIENT,
        "model.factory=tests.faults.models:HangingCnn",
        f"model.args={{width: 32, rank: 1, call: 30, once: {once}, ranks: {tmp_path}}}",
    ]
    with faults("T10", "Ray: a worker sleeps in its step", expected) as fault:
        job = Job(ray, launch, "hanging", *hanging)
        wait_until(lambda: once.exists() or job.has_ended, timeout_s=300)
        job.client.says("rank 1 does not come out of the forward pass; the others wait", HANG_TIMEOUT_S + 10)
        fault.saw(f"named after {time.time() - once.stat().st_mtime:.1f} s")
        wait_until(lambda: (tmp_path / "1").stat().st_mtime > once.stat().st_mtime, HANG_TIMEOUT_S + 60)
        on_after_s = (tmp_path / "1").stat().st_mtime - once.stat().st_mtime
        fault.saw(f"on after {on_after_s:.1f} s")
        assert on_after_s <= HANG_TIMEOUT_S + 60
        assert Trained.of(job.client.result()) == uninterrupted
        wait_until(ray.is_idle)
    with faults("T10", "the same, no failure allowed", "the job fails and says why") as fault:
        once.unlink()
        failed = Job(ray, launch, "hangs", *hanging, "train.max_failures=0").client.result()
        fault.saw(failed["error"])
        assert failed["status"] == "failed"
        assert "rank 1 does not come out of the forward pass" in failed["error"]
        wait_until(ray.is_idle)


def test_a_loss_that_is_not_finite_fails_the_job_and_ray_does_not_try_it_again(
    ray: Cluster, launch: Launch, faults: Faults
) -> None:
    broken = ["model.factory=tests.faults.troubled:TroubledCnn", "model.args={trouble: not a number, batch: 10}"]
    with faults("T9", "Ray: the loss of a step is not a number", "the job fails, and is not tried again") as fault:
        job = Job(ray, launch, "broken", *INTERRUPTED, *broken, "train.max_failures=2")
        failed = job.client.result()
        fault.saw(failed["error"].partition("(")[0].strip())
        assert failed["status"] == "failed"
        assert "step 10: the loss of rank 0, 1 is not finite" in failed["error"]
        assert "going on from step" not in job.output
        wait_until(ray.is_idle)
