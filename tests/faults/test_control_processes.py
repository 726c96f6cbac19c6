"""Ray's own control processes, killed while a job runs and an application answers."""

import concurrent.futures
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import psutil
import pytest
from upath import UPath

from tests.engine_contract import exported, rows
from tests.helpers import ROOT, local_cluster, run, wait_until
from tests.launch import EVERY_STEPS, INTERRUPTED, Cluster, Job, Launch, Trained, newest_step
from tests.load import Ask, Load, load_of
from tests.tables import Faults
from tests.toy import body, deploy, expected, is_right, publish

# Deploys an application, then counts to train.max_steps in an actor; told to resume, it goes on from the last number.
JOB = """
import os, sys, time
from pathlib import Path
import ray
from ray import serve

@serve.deployment(ray_actor_options={"num_cpus": 0})
class Answer:
    def __call__(self, request):
        return os.getpid()

@ray.remote(num_cpus=0)
class Counter:
    def __init__(self):
        self.count = 0
    def add(self, amount=1):
        self.count += amount
        return self.count, os.getpid()

ray.init(namespace="faults")
resumes = "train.resume=latest" in sys.argv
if not resumes:
    serve.start(http_options={"host": "127.0.0.1", "port": int(os.environ["RAYLOOM_SERVE_PORT"])})
    serve.run(Answer.bind())
ledger = Path(os.environ["RAYLOOM_STORAGE"]) / "ledger"
counter = Counter.options(name=str(time.time()), lifetime="detached").remote()
count = ray.get(counter.add.remote(len(ledger.read_text().splitlines()) if resumes else 0))[0]
(last,) = [int(word.partition("=")[2]) for word in sys.argv if word.startswith("train.max_steps=")]
while count < last:
    count, actor = ray.get(counter.add.remote())
    with ledger.open("a") as file:
        print(count, os.getpid(), actor, file=file)
    time.sleep(0.5)
"""

# Start a cluster as tests do, and never stop it.
HOLD = """
import sys, time
from pathlib import Path
from tests.helpers import local_cluster
with local_cluster(Path(sys.argv[1])):
    print("up", flush=True)
    time.sleep(600)
"""


class OwnCluster(Cluster):
    """The test's own cluster, whose control processes it kills."""

    def process(self, name: str) -> psutil.Process:
        """The oldest of that name: the raylet's forks bear its name for a moment."""
        found = [process for process in psutil.process_iter() if self.owns(process, name)]
        return min(found, key=lambda process: process.create_time())

    def owns(self, process: psutil.Process, name: str) -> bool:
        try:
            ours = process.environ().get("RAYLOOM_CLUSTER") == self.state.id
            return ours and name in (process.name(), *process.cmdline())
        except psutil.Error:  # another user's, or it has ended
            return False

    def kill(self, name: str) -> None:
        os.kill(self.process(name).pid, signal.SIGKILL)


class CountingCluster(OwnCluster):
    """The test's own cluster, and a project whose only job is the one above."""

    def __init__(self, folder: Path) -> None:
        super().__init__({"RAYLOOM_HOME": str(folder / "home"), "RAYLOOM_STORAGE": str(folder)})
        self.project = folder / "project"
        (self.project / "jobs").mkdir(parents=True)
        (self.project / "jobs/__init__.py").touch()
        (self.project / "jobs/train.py").write_text(JOB, encoding="utf-8")
        # Rayloom takes the folder for a checkout of its own, whose jobs are sent with it.
        (self.project / "app/cluster").mkdir(parents=True)
        (self.project / "app/cluster/packages.py").touch()
        shutil.copy(ROOT / "recipes/digits.yaml", self.project)

    def rayloom(self, *words: str) -> subprocess.CompletedProcess[str]:
        return run("rayloom", *words, environment=self.environment, folder=self.project, timeout=600)

    def submit(self, steps: int) -> subprocess.CompletedProcess[str]:
        return self.rayloom("submit", "train", "digits.yaml", f"train.max_steps={steps}")

    def ledger(self) -> list[tuple[int, int, int]]:
        """What the job has counted: the number, the pid of the driver, the pid of the actor."""
        path = Path(self.environment["RAYLOOM_STORAGE"]) / "ledger"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [tuple(int(word) for word in line.split()) for line in lines]

    def ask(self) -> int | str:
        """The status that the application answers with, or the name of the error."""
        try:
            return httpx.get(f"{self.state.endpoint}/", timeout=10).status_code
        except httpx.HTTPError as error:
            return type(error).__name__

    def jobs(self) -> dict[str, str]:
        """The status of each job by its id."""
        token = (Path(self.environment["RAYLOOM_HOME"]) / "cluster/token").read_text(encoding="utf-8")
        answer = httpx.get(f"{self.state.dashboard}/api/jobs/", headers={"Authorization": f"Bearer {token}"})
        return {job["submission_id"]: job["status"] for job in answer.json() if job["submission_id"]}


@pytest.fixture
def cluster() -> Iterator[CountingCluster]:
    """One for each test, for the next one is not to inherit its wounds."""
    folder = Path(tempfile.mkdtemp(prefix="rayloom-faults-"))
    cluster = CountingCluster(folder)
    started = cluster.rayloom("up")
    assert started.returncode == 0, started.stderr
    state = cluster.state
    yield cluster
    stopped = cluster.rayloom("down")
    assert stopped.returncode == 0, stopped.stderr
    assert not state.runtime.exists()
    shutil.rmtree(folder)


@pytest.fixture
def background() -> Iterator[concurrent.futures.Executor]:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        yield pool


def answers_until(ended: threading.Event, cluster: CountingCluster) -> Counter[int | str]:
    answers: Counter[int | str] = Counter()
    while not ended.wait(0.05):
        answers[cluster.ask()] += 1
    return answers


def test_a_killed_gcs_costs_nothing(
    cluster: CountingCluster, background: concurrent.futures.Executor, faults: Faults
) -> None:
    with faults("T4", "Ray: SIGKILL of the GCS", "no restart, no failed request") as fault:
        submitted = background.submit(cluster.submit, 30)
        wait_until(lambda: submitted.done() or len(cluster.ledger()) >= 3, 300)
        ended = threading.Event()
        answers = background.submit(answers_until, ended, cluster)
        died = cluster.process("gcs_server").pid
        cluster.kill("gcs_server")
        done = submitted.result()
        ended.set()
        assert done.returncode == 0, done.stdout + done.stderr
        assert set(answers.result()) == {200}
        assert [count for count, _, _ in cluster.ledger()] == list(range(1, 31))
        assert len({(driver, actor) for _, driver, actor in cluster.ledger()}) == 1
        assert f"relaunched the GCS: process {died} died" in cluster.rayloom("status").stdout
        assert cluster.submit(1).returncode == 0  # the next job needs a new actor and a new replica
        fault.saw(f"{answers.result()[200]} of {answers.result().total()} requests answered, the job ran on")


def test_a_killed_raylet_loses_the_cluster_and_the_job_is_submitted_again(
    cluster: CountingCluster, background: concurrent.futures.Executor, faults: Faults
) -> None:
    with faults("T5", "Ray: SIGKILL of the head's raylet", "cluster and job started anew in 90 s") as fault:
        submitted = background.submit(cluster.submit, 30)
        wait_until(lambda: submitted.done() or len(cluster.ledger()) >= 3, 300)
        (first,) = cluster.jobs()
        struck = time.monotonic()
        cluster.kill("raylet")
        wait_until(lambda: submitted.done() or len({driver for _, driver, _ in cluster.ledger()}) > 1, 300)
        seconds = time.monotonic() - struck
        done = submitted.result()
        assert done.returncode == 0, done.stdout + done.stderr
        assert cluster.jobs() == {first: "FAILED", f"{first}-again": "SUCCEEDED"}
        assert [count for count, _, _ in cluster.ledger()] == list(range(1, 31))
        assert len({driver for _, driver, _ in cluster.ledger()}) == 2
        assert f"job {first} was lost: submitted again as {first}-again" in cluster.rayloom("status").stdout
        wait_until(lambda: cluster.ask() == 200, 300)  # Serve has its applications from the store
        fault.saw(f"counts on after {seconds:.1f} s, every number once")
        assert seconds <= 90


@pytest.fixture
def served() -> Iterator[OwnCluster]:
    """A cluster that serves a published version. Each test gets its own."""
    home = Path(tempfile.mkdtemp(prefix="rayloom-faults-"))
    with local_cluster(home) as environment:
        publish(UPath(environment["RAYLOOM_STORAGE"]), exported())
        deploy(environment, 1)
        yield OwnCluster(environment)
    shutil.rmtree(home)


def trains(cluster: OwnCluster, launch: Launch, ranks: Path) -> Job:
    """Start a training job of half a minute, and wait for a checkpoint. Its workers write their pids."""
    job = Job(cluster, launch, "real", *INTERRUPTED, "model.args.pause_s=0.3", f"model.args.ranks={ranks}")
    storage = Path(cluster.environment["RAYLOOM_STORAGE"])
    wait_until(lambda: newest_step(storage, "real") > EVERY_STEPS or job.has_ended, timeout_s=300)
    assert not job.has_ended, job.output
    return job


def pids(ranks: Path) -> list[str]:
    return [file.read_text(encoding="utf-8") for file in sorted(ranks.iterdir())]


def requests_to(cluster: OwnCluster) -> AbstractContextManager[Load]:
    """Send requests at a steady rate. An answer counts only if its logits are right."""
    right = expected(rows(1))
    ask = Ask(
        f"{cluster.state.endpoint}/v2/models/toy/infer",
        json.dumps(body(rows(1))).encode(),
        is_right=lambda answer: is_right(answer, right),
    )
    return load_of(lambda: ask, per_second=20)


def test_a_killed_gcs_costs_a_training_and_the_endpoint_nothing(
    served: OwnCluster, launch: Launch, tmp_path: Path, uninterrupted: Trained, faults: Faults
) -> None:
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    with faults("T4", "the same, under a training and an endpoint", "the same workers and bits; no failure") as fault:
        job = trains(served, launch, ranks)
        workers, replicas = pids(ranks), served.replicas()
        with requests_to(served) as sent:
            served.kill("gcs_server")
            result = job.client.result()
        assert not sent.failed, sent.summary
        assert pids(ranks) == workers
        assert {*served.replicas()} == {*replicas}
        assert Trained.of(result) == uninterrupted
        assert "relaunched the GCS" in run("rayloom", "status", environment=served.environment).stdout
        fault.saw(f"{sent.summary} over HTTP; the same workers, and the bits of an undisturbed run")


def test_a_killed_raylet_costs_a_training_no_step_and_the_endpoint_seconds(
    served: OwnCluster, launch: Launch, tmp_path: Path, uninterrupted: Trained, faults: Faults
) -> None:
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    with faults("T5", "the same, under a training and an endpoint", "both on in 90 s; the same bits") as fault:
        job = trains(served, launch, ranks)
        with requests_to(served) as sent:
            struck, struck_s = time.time(), time.monotonic()
            served.kill("raylet")
            wait_until(lambda: min(file.stat().st_mtime for file in ranks.iterdir()) > struck, timeout_s=300)
            trained_s = time.time() - struck
            result = job.client.result()
        assert Trained.of(result) == uninterrupted
        answered = [answer for answer in sent.answers if answer.status == httpx.codes.OK and answer.is_right]
        out_s = max(later.sent_s - answer.sent_s for answer, later in itertools.pairwise(answered))
        assert answered[-1].sent_s > struck_s + out_s, "it answers until the end"
        assert all(answer.is_right for answer in sent.answers if answer.status == httpx.codes.OK)
        fault.saw(f"trains on after {trained_s:.1f} s, the same bits; {out_s:.1f} s without an answer; {sent.summary}")
        assert max(trained_s, out_s) <= 90


def test_without_a_supervisor_a_killed_gcs_is_told(
    cluster: CountingCluster, background: concurrent.futures.Executor, faults: Faults
) -> None:
    with faults("T4b", "Ray: SIGKILL of the GCS and its supervisor", "the client ends in 90 s, says why") as fault:
        submitted = background.submit(cluster.submit, 1000)
        wait_until(lambda: submitted.done() or len(cluster.ledger()) >= 3, 300)
        cluster.kill("app.cluster.supervisor")
        cluster.kill("gcs_server")
        struck = time.monotonic()
        done = submitted.result()
        seconds = time.monotonic() - struck
        assert done.returncode == 2
        assert "was lost with its cluster, and is not submitted again" in done.stderr
        fault.saw(f"after {seconds:.1f} s: {done.stderr.strip().splitlines()[-1]}")
        assert seconds <= 90
    with faults("T4b", "the same, a new cluster, submitted again", "goes on where it was") as fault:
        assert cluster.rayloom("down").returncode == 0
        before = len(cluster.ledger())
        assert cluster.rayloom("up").returncode == 0
        further = (f"train.max_steps={before + 3}", "train.resume=latest")
        assert cluster.rayloom("submit", "train", "digits.yaml", *further).returncode == 0
        assert [count for count, _, _ in cluster.ledger()] == list(range(1, before + 4))
        fault.saw(f"from {before} to {before + 3}, every number once")


def test_a_cluster_ends_with_the_tests_that_started_it(launch: Launch, faults: Faults) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="rayloom-faults-", ignore_cleanup_errors=True) as home,
        faults("T14", "SIGKILL of a process that runs tests", "its cluster ends") as fault,
    ):
        tests = launch("python", "-c", HOLD, home)
        tests.says("up")
        cluster = Cluster({"RAYLOOM_HOME": home}).state
        tests.process.kill()
        struck = time.monotonic()
        wait_until(lambda: not tests.left() and not cluster.processes())
        assert not cluster.runtime.exists()
        fault.saw(f"after {time.monotonic() - struck:.1f} s")
