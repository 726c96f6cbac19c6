"""Measure a cluster of 'rayloom node' and 'ray start' beside one of 'rayloom up': python -m benchmarks.serving.nodes

The endpoints serve the same file of the tiny CNN, and are loaded in turn.
"""

import argparse
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import permutations
from pathlib import Path
from statistics import median

import httpx

from app.ports import unused
from app.serving.ingress.haproxy import TLS_FILE, local_settings
from benchmarks.cluster import Cluster, local_cluster
from benchmarks.machine import Conditions, machine, versions
from benchmarks.markdown import Goal, goals_table, table, verdict
from benchmarks.rounds import turns
from benchmarks.serving.load import GeneratorMissingError, Load
from benchmarks.serving.models import Models, ServedModel
from benchmarks.serving.processes import running
from benchmarks.serving.rayloom import deploy
from benchmarks.serving.wire import BinaryTensors
from benchmarks.serving.workloads import EXACT, workload
from benchmarks.serving.wrk import WRK, drive
from benchmarks.spread import Spread

RESULTS = Path(__file__).with_name("RESULTS_NODE.md")
UP, NODE = "rayloom up", "rayloom node, ray start"
_BIN = Path(sys.executable).parent
_CONNECTIONS, _GOAL = (16, 64), 0.97
_HOW = """\
Both clusters have one node on this machine, and serve the same file of the tiny CNN with one replica and one thread.
The clusters were started one after the other, and both were running while they were measured. After half of the
rounds both were restarted in the other order, because two starts of the same cluster can differ by 10 %. In each
round, wrk loaded each endpoint with 16 connections and then with 64. The endpoint that went first alternated between
rounds. Before its turn, all answers of an endpoint were compared with those of ONNX Runtime. Ratios are computed
within each round. The table of goals has their median, with the minimum and maximum. The second cluster uses the
settings that `rayloom node` prints. Its ports were changed, so that both clusters can share the machine.
"""

Loads = dict[str, dict[int, list[Load]]]
"""By endpoint and number of connections."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print what was found and keep it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.nodes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="with each cluster started first")
    parser.add_argument("--seconds", type=int, default=4, help="of each load")
    parser.add_argument("--models", type=Path, help="folder of compiled models, kept for the next time")
    arguments = parser.parse_args(argv)
    try:
        WRK.require()
        conditions = Conditions()
        with tempfile.TemporaryDirectory(prefix="bench-nodes-") as folder:
            loads = measure((arguments.models or Path(folder)).absolute(), arguments.rounds, arguments.seconds)
    except GeneratorMissingError as error:
        sys.exit(f"error: {error}")
    text = report(loads, arguments.rounds, arguments.seconds, conditions)
    RESULTS.write_text(text, encoding="utf-8")
    print(text)


def measure(models: Path, num_rounds: int, seconds: int) -> Loads:
    """Load both endpoints in turn: ``num_rounds`` times with one cluster started first, as often with the other."""
    made = Models(models)
    pictures, wire = workload(made.cnn.onnx, made.pictures), BinaryTensors(made.cnn.name)
    loads: Loads = {name: {connections: [] for connections in _CONNECTIONS} for name in _CLUSTERS}
    for first, second in permutations(_CLUSTERS):
        with ExitStack() as stack:
            urls = {name: _serve(name, made.cnn, stack) for name in (first, second)}
            for order in turns([first, second], num_rounds):
                for name in order:
                    pictures.check(urls[name], wire, EXACT)
                    for connections in _CONNECTIONS:
                        load = drive(urls[name], pictures.requests(wire), connections, seconds)
                        loads[name][connections].append(load)
                        print(f"{name}, {connections} connections: {load.rate:.0f}/s", flush=True)
    return loads


def _serve(name: str, model: ServedModel, stack: ExitStack) -> str:
    """Start a cluster that serves a model, and return the endpoint's address."""
    http, grpc = unused(2)
    cluster = stack.enter_context(_CLUSTERS[name]())
    return deploy(cluster, model, f"serve.port={http}", f"serve.grpc_port={grpc}")["http"]


@contextmanager
def ray_started() -> Iterator[Cluster]:
    """A cluster of one node that is started as 'How to run on a cluster' shows, on ports that no other cluster has."""
    with tempfile.TemporaryDirectory(prefix="rn-", dir="/tmp") as temporary:
        folder = Path(temporary)
        token = folder / "token"
        token.write_text(secrets.token_hex(32), encoding="utf-8")
        token.chmod(0o600)
        gcs, dashboard, client, *others = unused(7)
        environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
            "RAYLOOM_HOME": str(folder / "home"),
            "RAYLOOM_STORAGE": str(folder / "storage"),
            "OMP_NUM_THREADS": "1",
        }
        settings = _settings_of_node(environment)
        files = Path(settings["RAY_SERVE_HAPROXY_BINARY_PATH"]).parent
        moved = {name: port for name, port in local_settings(files, *others).items() if name != TLS_FILE}
        command = [
            str(_BIN / "ray"),
            "start",
            "--head",
            "--block",
            "--disable-usage-stats",
            f"--temp-dir={folder / 'ray'}",
        ]
        command += [f"--port={gcs}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
        command += [f"--ray-client-server-port={client}", "--min-worker-port=0", "--max-worker-port=0"]

        def is_up() -> bool:
            return httpx.get(f"http://127.0.0.1:{dashboard}/api/gcs_healthz").is_success

        try:
            with running(command, environment | settings | moved, folder, is_up):
                yield Cluster(environment)
        finally:
            shutil.rmtree(files)


_CLUSTERS: Mapping[str, Callable[[], AbstractContextManager[Cluster]]] = {UP: local_cluster, NODE: ray_started}


def _settings_of_node(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that 'rayloom node' prints."""
    printed = subprocess.run([_BIN / "rayloom", "node"], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    words = [shlex.split(line.removeprefix("export "))[0] for line in printed.stdout.splitlines()]
    return dict(word.split("=", 1) for word in words)


def report(loads: Loads, num_rounds: int, seconds: int, conditions: Conditions) -> str:
    """The page."""

    def rate(name: str, connections: int) -> Spread:
        return Spread(tuple(load.rate for load in loads[name][connections]))

    def cells(loads: Sequence[Load]) -> list[str]:
        p50, p99 = (median(load.p50_ms for load in loads), median(load.p99_ms for load in loads))
        rates = median(load.rate for load in loads)
        return [f"{rates:.0f}", f"{p50:.2f}", f"{p99:.2f}", str(sum(load.errors for load in loads))]

    goals = []
    for connections in _CONNECTIONS:
        ratio = rate(NODE, connections).over(rate(UP, connections))
        what = f"{NODE} / {UP}, answers a second, {connections} connections"
        goals.append(Goal(what, f"≥ {_GOAL}", str(ratio), verdict(ratio.median >= _GOAL)))
    rows = [
        [name, str(connections), *cells(loads[name][connections])] for name in loads for connections in _CONNECTIONS
    ]
    header = ["cluster", "connections", "answers/s", "p50, ms", "p99, ms", "errors"]
    return "\n\n".join(
        [
            "# The endpoint of a cluster started by 'ray start'",
            f"`python -m benchmarks.serving.nodes --rounds {num_rounds} --seconds {seconds}`. {machine()}.\n"
            f"{versions(['rayloom', 'ray', 'onnxruntime'])}.\n{conditions}",
            goals_table(goals),
            table(header, rows),
            _HOW,
        ]
    )


if __name__ == "__main__":
    main()
