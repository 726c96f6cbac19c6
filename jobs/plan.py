"""Find a recipe's fastest parallel plans: python -m jobs.plan RECIPE [key=value …] [--cluster 64xa100-80]

Without ``--cluster`` plans are for the cluster that runs the job.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from pydantic import BaseModel

from app.planner.cluster import cluster_of
from app.runs import Outcome, Run
from app.storage import write_atomically
from app.training.planning.recipe import Options, plan_recipe
from app.training.planning.report import PlanReport, PlanRow
from jobs._cluster import live_cluster
from jobs._runner import main as run_job

PLANS_FILE = "plans.json"


class PlanMetrics(BaseModel):
    """The fastest plan, and how many there were."""

    plan: PlanRow | None
    """None: no plan fits."""
    num_fitting: int
    fewest_devices: int | None


def plan(given: argparse.Namespace, run: Run) -> Outcome:
    """Find the plans, print the table, and keep all of it as JSON."""
    train = run.recipe.train
    cluster = cluster_of(given.cluster, train.threads) if given.cluster else live_cluster(train)
    found = plan_recipe(run.recipe, cluster, Options(given.top, given.price, given.calibrate))
    run.open()
    file = run.folder / PLANS_FILE
    write_atomically(file, found.model_dump_json(indent=1).encode())
    print(found.model_dump_json(indent=1) if given.json else found.to_text(), flush=True)
    return Outcome(_metrics(found), {"plans": str(file)})


def _metrics(found: PlanReport) -> PlanMetrics:
    best = found.plans[0] if found.plans else None
    return PlanMetrics(plan=best, num_fitting=found.num_fitting, fewest_devices=found.fewest_devices)


def main(argv: Sequence[str] | None = None) -> int:
    """Read the options, and run the job on what is left of the command line."""
    parser = argparse.ArgumentParser(prog="python -m jobs.plan", add_help=False)
    parser.add_argument("--cluster")
    parser.add_argument("--top", type=int, default=5)
    parser.add_argument("--price", type=float)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--calibrate", action="store_true")
    given, rest = parser.parse_known_args(argv)
    return run_job("plan", partial(plan, given), [*rest, *(["--json"] if given.json else [])])


if __name__ == "__main__":
    sys.exit(main())
