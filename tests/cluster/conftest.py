"""Ray on machines without a shared disk: a head without CPUs for work, started as ``cluster.yaml`` starts it."""

import json
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.machines import HUB_ADDRESS, Machine, Network, is_possible
from tests.helpers import ROOT, result_line, wait_until

BUCKET = "rayloom"
DIGITS = ["recipes/digits.yaml", "train.workers=2", "train.resources={worker: 1}", "train.epochs=3", "tune.trials=2",
          "tune.epochs=1", "compile.engines=[openvino]", "compile.precisions=[fp32]", "compile.batch_sizes=[1]",
          "serve.host=0.0.0.0", "serve.replicas=2", "serve.resources={replica: 1}"]  # fmt: skip
_OBJECT_STORE = "--object-store-memory=150000000"
# Each machine holds one worker and one replica.
_WORK = ["--num-cpus=2", """--resources='{"worker": 1, "replica": 1}'"""]


class RayCluster:
    """A cluster whose storage is a bucket."""

    def __init__(self, folder: Path) -> None:
        self._token, self._commands = secrets.token_hex(32), yaml.safe_load((ROOT / "cluster.yaml").read_text())
        from tests.s3 import S3Server  # takes a second to load, and 'make test' collects this file, too

        self.network = Network(folder)
        with self.network.entered():
            self.s3 = S3Server(HUB_ADDRESS)
            self._bucket().create()

    def start(self) -> None:
        """Start the head, and two machines that work."""
        self.start_head()
        for _ in range(2):
            self.join()

    def start_head(self, scaling: dict[str, Any] | None = None, before: str = "true", **settings: str) -> None:
        """Start the head.

        ``scaling`` configures an autoscaler, ``before`` is a shell command that runs first on the machine, and
        ``settings`` are environment variables of Ray.
        """
        self.workers: list[Machine] = []
        self.head = self._add(self._token)
        options = ["--num-cpus=0", f"--node-ip-address={self.head.address}"]
        if scaling:
            (self.head.disk / "scaling.yaml").write_text(json.dumps(scaling), encoding="utf-8")
            options.append("--autoscaling-config=/tmp/scaling.yaml")
        prepared = self.head.run("sh", "-c", before, environment=self.environment)
        assert prepared.returncode == 0, prepared.stderr
        self._start(self.head, "head_start_ray_commands", *options, **settings)
        wait_until(lambda: len(self.nodes()) == 1)

    def join(
        self, options: Sequence[str] = _WORK, before: str = "true", delay_s: float = 0, **settings: str
    ) -> Machine:
        """Add a machine for work, and wait until Ray has it.

        Args:
            options: of ``ray start``.
            before: a shell command that runs first on the machine.
            delay_s: how much later everything arrives that the machine sends or is sent.
            settings: environment variables of Ray.
        """
        machine = self._add(self._token, delay_s)
        self.workers.append(machine)
        prepared = machine.run("sh", "-c", before, environment=self.environment)
        assert prepared.returncode == 0, prepared.stderr
        named = f"--node-ip-address={machine.address}"
        self._start(machine, "worker_start_ray_commands", named, *options, **settings)
        wait_until(lambda: machine.address in self.nodes())
        return machine

    def lose(self, machine: Machine) -> None:
        """Take away a machine that works."""
        self.workers.remove(machine)
        machine.lose()

    def drain(self, machine: Machine, within_s: int) -> float:
        """Announce the end of a machine, as a cloud does. Return when that began."""
        node = self.nodes()[machine.address]
        began_s = time.monotonic()
        announced = self.on_head(
            *("ray", "drain-node", f"--address={self.head.address}:6379", f"--node-id={node}"),
            *("--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=taken back"),
            f"--deadline-remaining-seconds={within_s}",
        )
        assert announced.returncode == 0, announced.stdout + announced.stderr
        return began_s

    def refuse(self) -> str:
        """Add a machine with another token. Return what it says."""
        machine = self._add(secrets.token_hex(32))
        started = self._started(machine, "worker_start_ray_commands", f"--node-ip-address={machine.address}")
        assert started.returncode != 0
        return started.stdout + started.stderr

    def nodes(self) -> dict[str, str]:
        """The ids of the living nodes by address. Empty while the dashboard starts."""
        return {node["node_ip"]: node["node_id"] for node in self.listed("nodes", "state=ALIVE")}

    def listed(self, kind: str, *filters: str) -> list[dict[str, Any]]:
        """Return what Ray's state API lists. Empty while the dashboard starts."""
        chosen = [word for given in filters for word in ("--filter", given)]
        listed = self.on_head("ray", "list", kind, *chosen, "--format=json", "--limit=1000", "--detail")
        found: list[dict[str, Any]] = json.loads(listed.stdout) if listed.returncode == 0 else []
        return found

    def replicas(self) -> list[str]:
        """The addresses of the machines of the replicas that run."""
        machines = {node: address for address, node in self.nodes().items()}
        found = self.listed("actors", "state=ALIVE", "class_name=ServeReplica:rayloom:ModelServer")
        return sorted(machines[replica["node_id"]] for replica in found if replica["node_id"] in machines)

    def on_head(self, *command: str, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
        """Run a command on the head."""
        return self.head.run(*command, environment=self.environment, timeout_s=timeout_s)

    def submit(self, job: str, *arguments: str) -> dict[str, Any]:
        """Submit a job from the head, and return its RESULT."""
        command = ["ray", "job", "submit", "--working-dir", ".", "--", "python", "-m", f"jobs.{job}", *arguments]
        done = self.on_head(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        return result_line(done.stdout)

    def upload(self, folder: Path, name: str) -> str:
        """Copy a folder's files to the bucket, and return the URI of the copy."""
        with self.network.entered():
            for file in folder.iterdir():
                self._bucket().upload_file(str(file), f"{name}/{file.name}")
        return f"s3://{BUCKET}/{name}"

    def copy(self, uri: str, folder: Path) -> Path:
        """Copy a folder of the bucket, and return the copy."""
        prefix = uri.removeprefix(f"s3://{BUCKET}/")
        with self.network.entered():
            found_objects = self._bucket().objects.filter(Prefix=f"{prefix}/")
            for found in (each for each in found_objects if not each.key.endswith("/")):  # which marks a folder
                target = folder / found.key.removeprefix(f"{prefix}/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(found.get()["Body"].read())
        return folder

    def _bucket(self) -> Any:
        import boto3

        return boto3.resource("s3", **_credentials(self.s3.environment)).Bucket(BUCKET)

    @property
    def endpoint_headers(self) -> dict[str, str]:
        """The headers that the endpoint asks for."""
        token = (self.head.disk / "home/.rayloom/endpoint_token").read_text(encoding="utf-8").strip()
        return {"authorization": f"Bearer {token}"}

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every process."""
        return {
            **self.s3.environment,
            "HOME": "/tmp/home",
            "RAY_AUTH_MODE": "token",
            "RAYLOOM_STORAGE": f"s3://{BUCKET}/rayloom",
            "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:8265",
            "OMP_NUM_THREADS": "1",
        }

    def stop(self) -> None:
        """End all machines."""
        self.network.close()
        self.s3.stop()

    def _add(self, token: str, delay_s: float = 0) -> Machine:
        machine = self.network.add(delay_s)
        file = machine.disk / "home/.ray/auth_token"
        file.parent.mkdir(parents=True)
        file.write_text(token, encoding="utf-8")
        file.chmod(0o600)
        return machine

    def _start(self, machine: Machine, commands: str, *options: str, **settings: str) -> None:
        started = self._started(machine, commands, *options, **settings)
        assert started.returncode == 0, started.stdout + started.stderr

    def _started(
        self, machine: Machine, commands: str, *options: str, **settings: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the commands of ``cluster.yaml`` for a node, without the cloud's parts."""
        (command,) = (line for line in self._commands[commands] if line != "ray stop")
        command = command.replace("s3://YOUR-BUCKET", f"s3://{BUCKET}")
        command = command.replace("--autoscaling-config=~/ray_bootstrap_config.yaml", "")
        environment = {**self.environment, "RAY_HEAD_IP": self.head.address, **settings}
        script = " ".join([command, _OBJECT_STORE, "--disable-usage-stats", *options])
        return machine.run("sh", "-c", script, environment=environment)


def _credentials(environment: dict[str, str]) -> dict[str, str]:
    return {
        "endpoint_url": environment["AWS_ENDPOINT_URL"],
        "aws_access_key_id": environment["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": environment["AWS_SECRET_ACCESS_KEY"],
        "region_name": environment["AWS_DEFAULT_REGION"],
    }


@contextmanager
def made_cluster() -> Iterator[RayCluster]:
    """Make a cluster that has not started, and end it after the block."""
    if not is_possible():
        pytest.skip("this user may not make network namespaces")
    folder = Path(tempfile.mkdtemp(prefix="rlm-", dir="/tmp"))
    made = RayCluster(folder)
    try:
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    """A head without CPUs, and two machines that work."""
    with made_cluster() as made:
        made.start()
        yield made


@pytest.fixture
def workers(cluster: RayCluster) -> Iterator[list[Machine]]:
    """Yield the machines that work. There are two, also after a test that lost or added one."""
    yield cluster.workers
    while len(cluster.workers) > 2:
        cluster.lose(cluster.workers[-1])
    wait_until(lambda: len(cluster.nodes()) == len(cluster.workers) + 1, timeout_s=120)
    while len(cluster.workers) < 2:
        cluster.join()


@pytest.fixture(scope="session")
def lifecycle(cluster: RayCluster) -> dict[str, Any]:
    """The RESULT of a lifecycle, whose model two machines serve."""
    return cluster.submit("lifecycle", *DIGITS)


@pytest.fixture
def url(cluster: RayCluster, workers: list[Machine], lifecycle: dict[str, Any]) -> str:
    """The URL of the model on the first machine that works. Both have a replica."""
    assert lifecycle["status"] == "succeeded"
    wait_until(lambda: cluster.replicas() == sorted(machine.address for machine in workers), timeout_s=180)
    return f"http://{workers[0].address}:8000/v2/models/digits/infer"
