"""Measure what watching costs on a real cluster, and write RESULTS.md: python -m benchmarks.monitoring"""

import argparse
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from pathlib import Path

import numpy as np
import psutil

from app.cluster.state import ClusterState
from app.telemetry.tracing import ENDPOINTS
from benchmarks.cluster import Cluster, local_cluster
from benchmarks.machine import Conditions, machine, versions
from benchmarks.markdown import table, verdict
from benchmarks.monitoring.switched import FOLDER, TURN_S, Mark, State
from benchmarks.serving import wrk
from benchmarks.serving.wire import BinaryTensors
from benchmarks.spread import Spread

RESULTS = Path(__file__).with_name("RESULTS.md")
_RECIPE = "recipes/digits.yaml"
_SMALL = ("tune=null", "train.workers=1")
_SHORT = (*_SMALL, "train.epochs=2")
_LONG = (*_SMALL, "train.epochs=100000", "train.early_stopping=null")
_CONNECTIONS = 16
_STEPS_PER_S = 38
"""About as many steps of the recipe does this machine in a second."""
_GOALS = {
    ("replica", State.ON, State.OFF): ("metrics, CPU of a request", 0.02),
    ("worker", State.ON, State.OFF): ("metrics, CPU of a training step", 0.02),
    ("replica", State.TRACED, State.ON): ("traces of 1 % of the requests, CPU of a request", 0.03),
}
"""What is compared: the states of a process, and the goal for the overhead of the first."""
_HEAD = f"""# The overhead of monitoring

Written by `python -m benchmarks.monitoring`. It starts a cluster with `rayloom up --monitoring`. Its Prometheus
scrapes all metrics every five seconds. The replica and the training worker switch between these states every
{TURN_S:g} s:

- on: metrics as usual. The replica has no tracer.
- off: the replica counts no requests, keeps no histograms and reports nothing. The worker publishes nothing.
- traced: metrics as usual, and one request in a hundred is traced. A collector receives the spans.

Each process records the CPU time of all its threads. So all states are measured in the same process, under the same
load.

The model is the one of `{_RECIPE}`, which is very small. With larger models the overhead is smaller. The
load is {_CONNECTIONS} connections of wrk, with one picture per request.
"""


Costs = Mapping[tuple[str, State], Spread]
"""CPU seconds of a request or step, by process and state."""


def main() -> None:
    """Measure, and write the page."""
    arguments = _arguments()
    conditions = Conditions()
    with tempfile.TemporaryDirectory(prefix="bench-monitoring-") as folder, _collector() as collector:
        os.environ |= {FOLDER: folder, ENDPOINTS[1]: collector}
        with local_cluster("--monitoring") as cluster:
            cluster.submit("lifecycle", _RECIPE, *_SHORT)
            with _busy_share(cluster) as shares:
                _load(cluster, seconds=int(len(State) * TURN_S * (arguments.rounds + 1)))
            steps = int(2 * TURN_S * (arguments.rounds + 1)) * _STEPS_PER_S
            cluster.run("benchmarks.monitoring.switched", "train", _RECIPE, *_LONG, f"train.max_steps={steps}")
        costs = costs_of(Path(folder), arguments.rounds)
    packages = versions(["ray", "torch", "onnxruntime", "openvino", "opentelemetry-sdk"])
    about = f"{machine()}; {packages}; {conditions}"
    text = f"{_HEAD}\n{about}\n\n{report(costs, shares[0])}\n"
    arguments.results.write_text(text, encoding="utf-8")
    print(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.monitoring", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="turns of each state")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to write")
    return parser.parse_args()


def _load(cluster: Cluster, seconds: int) -> None:
    """Serve the model by a replica that switches, and send requests to it."""
    deployed = cluster.run("benchmarks.monitoring.switched", "deploy", _RECIPE, "tune=null")
    row = {"pixel_values": np.zeros((1, 1, 8, 8), np.float32)}
    load = wrk.drive(deployed.result.artifacts["http"], [BinaryTensors("digits").request(row)], _CONNECTIONS, seconds)
    print(f"{load.rate:.0f} requests/s, {load.errors} errors", flush=True)


@contextmanager
def _collector() -> Iterator[str]:
    """Take spans and forget them. Yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@contextmanager
def _busy_share(cluster: Cluster) -> Iterator[list[float]]:
    """Yield a list that gets, at the end, the share of one core that Prometheus and the other watchers took."""
    file = Path(cluster.environment["RAYLOOM_HOME"]) / "cluster/cluster.json"
    state, shares = ClusterState.model_validate_json(file.read_bytes()), list[float]()
    before, began_s = _cpu_s(state.watchers()), time.monotonic()
    yield shares
    shares.append((_cpu_s(state.watchers()) - before) / (time.monotonic() - began_s))


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(time_.user + time_.system for time_ in times)


def costs_of(folder: Path, rounds: int) -> Costs:
    """Return what each state cost, in at most so many turns."""
    found: dict[tuple[str, State], list[float]] = defaultdict(list)
    for file in folder.glob("*.jsonl"):
        marks = [Mark.model_validate_json(line) for line in file.read_text(encoding="utf-8").splitlines()]
        turns = [list(group) for _, group in groupby(marks, key=lambda mark: mark.turn)]
        busy = [turn for turn in turns if turn[-1].done > turn[0].done]
        for turn in busy[1:-1]:  # the load begins in the first, and ends in the last
            cost = (turn[-1].cpu_s - turn[0].cpu_s) / (turn[-1].done - turn[0].done)
            found[file.name.partition("-")[0], turn[0].state].append(cost)
    fewest = {process: min(len(costs) for (of, _), costs in found.items() if of == process) for process, _ in found}
    return {
        (process, state): Spread(tuple(costs[: min(rounds, fewest[process])]))
        for (process, state), costs in found.items()
    }


def report(costs: Costs, watchers: float) -> str:
    """Return the tables of the page. ``watchers`` is the share of a core that Prometheus and the others took."""
    goals, rows = [], []
    for (process, state, base), (what, bound) in _GOALS.items():
        measured, baseline = costs[process, state], costs[process, base]
        ratio = measured.over(baseline)
        overhead = ratio.median - 1
        goals.append([what, f"≤ {bound:.0%}", f"{overhead:+.1%}", verdict(overhead <= bound)])
        shown = [f"{1e6 * spread.median:.1f}" for spread in (measured, baseline)]
        rows.append([what, f"{state} / {base}", str(len(ratio.values)), *shown, str(ratio)])
    return "\n\n".join(
        [
            table(["overhead", "goal", "reached", ""], goals),
            table(["", "states", "rounds", "µs", "µs, baseline", "ratio"], rows),
            "A ratio is the median over the rounds, with the minimum and maximum.",
            "Together, Prometheus, Alertmanager, the node exporter and Rayloom's own watcher used "
            f"{watchers:.1%} of one core while the\nendpoint was under load.",
        ]
    )


if __name__ == "__main__":
    main()
