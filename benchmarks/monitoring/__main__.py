"""Measure what watching costs on a real cluster, and write RESULTS.md: python -m benchmarks.monitoring"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import numpy as np
import psutil

from app.cluster.state import ClusterState
from benchmarks.cluster import Cluster, local_cluster
from benchmarks.machine import load_average, machine, today, versions
from benchmarks.markdown import Goal, table, verdict
from benchmarks.monitoring.switched import FOLDER, TURN_S, Mark
from benchmarks.serving import wrk
from benchmarks.serving.wire import BinaryTensors
from benchmarks.spread import Spread

RESULTS = Path(__file__).with_name("RESULTS.md")
_RECIPE = "recipes/digits.yaml"
_SHORT = ("tune=null", "train.workers=1", "train.epochs=2")
_CONNECTIONS = 16
_STEPS_PER_S = 60
"""About as many steps of the recipe does this machine in a second."""
_MAX_OVERHEAD = 0.02
_HEAD = f"""# What watching costs

Written by `python -m benchmarks.monitoring`. It starts a cluster with `rayloom up --monitoring`. Prometheus reads all
metrics every five seconds throughout. The replica and the worker of training switch their own metrics on and off, in turns
of {TURN_S:g} s. When off, a replica counts no requests, keeps no histograms and reports nothing, and a worker publishes
nothing. Each process notes the CPU time of all its threads. So both states are of one process, under the same load.

The model is that of `{_RECIPE}`, one of the smallest there are. With larger models the overhead is smaller. The load is
{_CONNECTIONS} connections of wrk, with one picture in a request.
"""


def main() -> None:
    """Measure, and write the page."""
    arguments = _arguments()
    seconds = int(2 * TURN_S * (arguments.rounds + 1))
    load = load_average()
    with tempfile.TemporaryDirectory(prefix="bench-monitoring-") as folder:
        os.environ[FOLDER] = folder
        with local_cluster("--monitoring") as cluster:
            cluster.submit("lifecycle", _RECIPE, *_SHORT)
            watchers = list[float]()
            with _busy_share(cluster, watchers):
                _load(cluster, seconds)
            cluster.run("benchmarks.monitoring.switched", "train", _RECIPE, *_training(seconds))
        requests, steps = (_costs(Path(folder), name, arguments.rounds) for name in ("replica", "worker"))
    packages = versions(["ray", "torch", "onnxruntime", "openvino"])
    about = f"{machine()}; {packages}; {today()}, load average {load}"
    text = f"{_HEAD}\n{about}\n\n{_report(requests, steps, watchers[0])}\n"
    arguments.results.write_text(text, encoding="utf-8")
    print(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.monitoring", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="turns with metrics, and as many without")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to write")
    return parser.parse_args()


def _load(cluster: Cluster, seconds: int) -> None:
    """Serve the model by a replica that switches, and send requests to it."""
    deployed = cluster.run("benchmarks.monitoring.switched", "deploy", _RECIPE, "tune=null")
    row = {"pixel_values": np.zeros((1, 1, 8, 8), np.float32)}
    load = wrk.drive(deployed.result.artifacts["http"], [BinaryTensors("digits").request(row)], _CONNECTIONS, seconds)
    print(f"{load.rate:.0f} requests/s, {load.errors} errors", flush=True)


def _training(seconds: int) -> Sequence[str]:
    """Return the overrides of a training that takes about so long."""
    steps = seconds * _STEPS_PER_S
    return (*_SHORT, "train.epochs=1000", "train.early_stopping=null", f"train.max_steps={steps}")


@contextmanager
def _busy_share(cluster: Cluster, shares: list[float]) -> Iterator[None]:
    """Append the share of one core that Prometheus and the other watchers took within the block."""
    state = ClusterState.model_validate_json(
        (Path(cluster.environment["RAYLOOM_HOME"]) / "cluster/cluster.json").read_bytes()
    )
    before, began_s = _cpu_s(state.watchers()), time.monotonic()
    yield
    shares.append((_cpu_s(state.watchers()) - before) / (time.monotonic() - began_s))


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(time_.user + time_.system for time_ in times)


def _costs(folder: Path, name: str, rounds: int) -> tuple[Spread, Spread]:
    """Return the CPU seconds of a request or step, with metrics on and off, of so many turns of each."""
    (file,) = folder.glob(f"{name}-*.jsonl")
    marks = [Mark.model_validate_json(line) for line in file.read_text(encoding="utf-8").splitlines()]
    turns = [list(group) for _, group in groupby((mark for mark in marks if mark.done), key=lambda mark: mark.turn)]
    whole = turns[1:-1]  # the load begins in the first, and ends in the last
    first = whole[0][0].turn % 2  # begin with a turn that is on
    costs = [_cost(turn) for turn in whole[first:]][: 2 * rounds]
    return Spread(tuple(costs[::2][: len(costs) // 2])), Spread(tuple(costs[1::2]))


def _cost(turn: Sequence[Mark]) -> float:
    return (turn[-1].cpu_s - turn[0].cpu_s) / (turn[-1].done - turn[0].done)


def _report(requests: tuple[Spread, Spread], steps: tuple[Spread, Spread], watchers: float) -> str:
    rows, goals = [], []
    for what, (on, off) in {"a request, replica": requests, "a training step, worker": steps}.items():
        ratio = on.over(off)
        shown = [f"{1e6 * spread.median:.1f}" for spread in (on, off)]
        rows.append([what, str(len(on.values)), *shown, str(ratio)])
        overhead = ratio.median - 1
        goals.append(
            Goal(f"CPU of {what}", f"≤ {_MAX_OVERHEAD:.0%}", f"{overhead:+.1%}", verdict(overhead <= _MAX_OVERHEAD))
        )
    return "\n\n".join(
        [
            table(
                ["overhead", "goal", "reached", ""],
                [[goal.what, goal.goal, goal.reached, goal.verdict] for goal in goals],
            ),
            table(["", "rounds", "on, µs of CPU", "off, µs of CPU", "on / off, by round"], rows),
            "The ratio is the median of the rounds, with the smallest and the largest.",
            f"Prometheus, Alertmanager, the node exporter and Rayloom's own watcher took {watchers:.1%} of one core "
            "together, while the endpoint was under load.",
        ]
    )


if __name__ == "__main__":
    main()
