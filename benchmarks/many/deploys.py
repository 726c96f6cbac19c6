"""Time a deploy beside few and many models on a local cluster. It includes Serve, HAProxy and a replica's reload."""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from app.serving.deployment import deployed_model
from app.serving.pools import SHARED
from app.storage import open_storage
from benchmarks.cluster import Cluster, local_cluster
from benchmarks.many.measures import Cost
from benchmarks.many.population import RECIPE, name_of, recipe_in, write_versions
from jobs._cluster import connect
from jobs._endpoint import desired_pools, endpoint_lock, roll_out

_ROOT = Path(__file__).parents[2]
_OPTIONS = ("serve.version=1", "serve.replicas=1")
_READY_S = 240.0


def of_deploys(count: int) -> dict[str, list[Cost]]:
    """Return the costs of a deploy and of the status beside one served model, and beside ``count``."""
    with local_cluster() as cluster:
        write_versions(open_storage(cluster.environment["RAYLOOM_STORAGE"]), count + 2, 1)
        _deploy(cluster, count)  # starts Serve
        few = [_deploy(cluster, count + 1), _status(cluster)]
        _fill(cluster, count - 1)
        many = [_deploy(cluster, count - 1), _status(cluster)]
    calls = ("a deploy, until requests reach the model", "the command rayloom status")
    return {call: [beside_few, beside_many] for call, beside_few, beside_many in zip(calls, few, many, strict=True)}


def _deploy(cluster: Cluster, model: int) -> Cost:
    submitted = cluster.submit("deploy", RECIPE, f"name={name_of(model)}", *_OPTIONS)
    return Cost(float(submitted.result.metrics["ready_s"]), 0)


def _status(cluster: Cluster) -> Cost:
    began_s = time.perf_counter()
    subprocess.run([_command("rayloom"), "status"], env=cluster.environment, stdout=subprocess.DEVNULL, check=True)
    return Cost(time.perf_counter() - began_s, 0)


def _fill(cluster: Cluster, count: int) -> None:
    """Deploy many models in one step: this module as a job of the cluster."""
    printed = subprocess.run(
        [_command("rayloom"), "env"], env=cluster.environment, capture_output=True, text=True, check=True
    )
    words = shlex.split(printed.stdout)
    address = dict(word.split("=", 1) for word in words if "=" in word)
    entrypoint = ["python", "-m", "benchmarks.many.deploys", str(count)]
    command = [_command("ray"), "job", "submit", "--working-dir", ".", "--", *entrypoint]
    subprocess.run(command, cwd=_ROOT, env={**os.environ, **cluster.environment, **address}, check=True)


def _command(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _serve_all(count: int) -> None:
    """Serve the first ``count`` models of the cluster's storage beside those that are already served. Runs as a job."""
    storage = open_storage(None)
    models = {name_of(number): deployed_model(recipe_in(storage, name_of(number)), storage) for number in range(count)}
    connect()
    with endpoint_lock():
        before = desired_pools()
        after = before
        for name, model in models.items():
            after = after.serving(SHARED, name, model)
        roll_out(before, after, SHARED, _READY_S)


if __name__ == "__main__":
    _serve_all(int(sys.argv[1]))
