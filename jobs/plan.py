"""Find a recipe's fastest parallel plans: python -m jobs.plan RECIPE [key=value …] [--cluster 64xa100-80]

Without ``--cluster`` plans are for the cluster that runs the job.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial

import ray
from pydantic import BaseModel

from app.errors import PlanError
from app.planner.cluster import Cluster, cluster_of, this_machine
from app.planner.recipe import Options, plan_recipe
from app.planner.report import PlanReport, PlanRow
from app.runs import Outcome, Run
from app.storage import write_atomically
from jobs._cluster import connect
from jobs._runner import main as run_job

PLANS_FILE = "plans.json"
_ACCELERATORS = {
    "A100": "a100-40",
    "A100-40G": "a100-40",
    "A100-80G": "a100-80",
    "H100": "h100",
    "H200": "h200",
    "B200": "b200",
    "L4": "l4",
    "T4": "t4",
}
"""Names of Ray's for the catalogue's devices. Of an A100 that does not say, the smaller memory is taken."""


class PlanMetrics(BaseModel):
    """The fastest plan, and how many there were."""

    plan: PlanRow | None
    """None: no plan fits."""
    num_fitting: int
    fewest_devices: int | None


def plan(given: argparse.Namespace, run: Run) -> Outcome:
    """Find the plans, print the table, and keep all of it as JSON."""
    cluster = cluster_of(given.cluster) if given.cluster else _live_cluster(run.recipe.train.workers_range[1])
    found = plan_recipe(run.recipe, cluster, Options(given.top, given.price, given.calibrate))
    run.open()
    file = run.folder / PLANS_FILE
    write_atomically(file, found.model_dump_json(indent=1).encode())
    print(found.model_dump_json(indent=1) if given.json else found.to_text(), flush=True)
    return Outcome(_metrics(found), {"plans": str(file)})


def _metrics(found: PlanReport) -> PlanMetrics:
    best = found.plans[0] if found.plans else None
    return PlanMetrics(plan=best, num_fitting=found.num_fitting, fewest_devices=found.fewest_devices)


def _live_cluster(workers: int) -> Cluster:
    """Return the cluster that runs this job: its GPUs, or without any ``workers`` processes on CPUs."""
    connect()
    return cluster_of_nodes([node["Resources"] for node in ray.nodes() if node["Alive"]], workers)


def cluster_of_nodes(nodes: Sequence[Mapping[str, float]], workers: int) -> Cluster:
    """Return the cluster of nodes with these resources.

    Raises:
        PlanError: the catalogue does not have the GPUs, or nodes have unlike ones.
    """
    with_gpus = [resources for resources in nodes if resources.get("GPU")]
    if not with_gpus:
        return this_machine(workers)
    kinds = {(_accelerator(resources), int(resources["GPU"])) for resources in with_gpus}
    if len(kinds) > 1:
        shown = ", ".join(f"{count} x {name}" for name, count in sorted(kinds))
        raise PlanError(f"the cluster's nodes have unlike GPUs ({shown}): give --cluster those that training will use")
    name, count = kinds.pop()
    if name not in _ACCELERATORS:
        raise PlanError(f"GPU {name!r} is not in the catalogue: give --cluster a file with its figures")
    return cluster_of(f"{len(with_gpus)}x{count}x{_ACCELERATORS[name]}")


def _accelerator(resources: Mapping[str, float]) -> str:
    """Return the name that Ray gives a node's GPUs."""
    prefix = "accelerator_type:"
    return next((key.removeprefix(prefix) for key in resources if key.startswith(prefix)), "of unknown type")


def main(argv: Sequence[str] | None = None) -> int:
    """Read the options, and run the job on what is left of the command line."""
    parser = argparse.ArgumentParser(prog="python -m jobs.plan", add_help=False)
    parser.add_argument("--cluster")
    parser.add_argument("--top", type=int, default=5)
    parser.add_argument("--price", type=float)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--calibrate", action="store_true")
    given, rest = parser.parse_known_args(argv)
    return run_job("plan", partial(plan, given), rest)


if __name__ == "__main__":
    sys.exit(main())
