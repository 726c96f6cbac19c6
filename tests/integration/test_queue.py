"""Jobs of two people on a cluster that has room for one."""

import json
import time

import pytest

from app.cluster.jobs import JobsApi
from app.cluster.queue_view import ListedJob, listed_jobs
from tests.helpers import run, wait_until
from tests.launch import Cluster, Job, Launch

SHORT = ["train.epochs=1", "train.max_steps=2", "train.early_stopping=null", "train.workers=1"]
LONG = ["train.epochs=900", "train.early_stopping=null", "train.workers=1"]


@pytest.mark.slow
def test_jobs_wait_for_their_turns_in_a_fair_order_that_everybody_sees(ray: Cluster, launch: Launch) -> None:
    wait_until(lambda: ray.cpus()[1] > 0)
    whole = f"train.cpus_per_worker={ray.cpus()[1]:g}"
    api = JobsApi.of(ray.environment)

    def send(user: str, name: str, *options: str) -> Job:
        sent = Job(Cluster({**ray.environment, "RAYLOOM_USER": user}), launch, name, whole, *options)
        sent.client.says("submitted")
        return sent

    def listed() -> dict[str, ListedJob]:
        """By the names of their recipes."""
        names = {job.submission_id: job.metadata["job_name"] for job in api.jobs()}
        return {names[row.job]: row for row in listed_jobs(api)}

    def line() -> list[str]:
        time.sleep(0.3)
        return [name for name, row in listed().items() if row.state == "waiting"]

    long = send("anna", "long", *LONG)
    wait_until(lambda: "long" in listed() and listed()["long"].state == "running")
    assert "waiting" not in long.output, "it was alone"
    sent = {"long": long}
    for user, name, priority, expected in [
        ("anna", "second", "normal", ["second"]),
        ("bob", "third", "normal", ["third", "second"]),
        ("bob", "killed", "low", ["third", "second", "killed"]),
        ("anna", "urgent", "high", ["urgent", "third", "second", "killed"]),
    ]:
        sent[name] = send(user, name, f"--priority={priority}", *SHORT)
        wait_until(lambda expected=expected: line() == expected, timeout_s=90)
    wait_until(lambda: [row.place for row in listed().values()] == [None, 1, 2, 3, 4], timeout_s=30)

    shown = run("rayloom", "jobs", environment=ray.environment).stdout.splitlines()
    assert [row.split()[1:3] for row in shown[1:]] == [
        ["anna", "normal"], ["anna", "high"], ["bob", "normal"], ["anna", "normal"], ["bob", "low"]
    ]  # fmt: skip
    rows = json.loads(run("rayloom", "jobs", "--json", environment=ray.environment).stdout)
    assert [(row["state"], row["place"]) for row in rows] == [
        ("running", None), ("waiting", 1), ("waiting", 2), ("waiting", 3), ("waiting", 4)
    ]  # fmt: skip
    assert rows[2]["behind"] == [rows[1]["job"], rows[0]["job"]]
    assert rows[2]["needs"] == {"CPU": ray.cpus()[1]}

    sent["killed"].driver().kill()
    wait_until(lambda: line() == ["urgent", "third", "second"], timeout_s=60)
    long.stop()
    begun: list[str] = []

    def all_ended() -> bool:
        begun.extend(name for name, row in listed().items() if row.state == "running" and name not in begun)
        return all(job.has_ended for job in sent.values())

    wait_until(all_ended, timeout_s=240)
    assert begun == ["urgent", "third", "second"]
    assert [sent[name].client.process.returncode for name in ("urgent", "third", "second")] == [0, 0, 0]
    assert "the job's turn has come" in sent["second"].output
    assert listed() == {}
