"""Prepare a recipe's data as shards on the Ray cluster: python -m jobs.prepare RECIPE [key=value …]"""

import sys

from pydantic import BaseModel

from app.data.examples import Reason
from app.data.prepared import TEST, TRAIN, VALIDATION, GrowingData
from app.errors import RecipeError
from app.runs import Outcome, Run
from app.telemetry.tracing import stage
from jobs._runner import main
from jobs._shards import prepare_on_cluster


class PrepareMetrics(BaseModel):
    """What was prepared."""

    train_rows: int
    validation_rows: int
    test_rows: int
    given: int
    dropped: int
    dropped_by_reason: dict[Reason, int]
    shards: int
    bytes: int


def prepare(run: Run) -> Outcome:
    """Make the shards, unless they are there."""
    if run.recipe.data.stream:
        raise RecipeError(
            f"recipe {run.recipe.name} reads a stream, which training prepares as its messages arrive: submit train"
        ).of("prepare.stream", "data.stream")
    run.open()
    with stage("prepare"):
        data = prepare_on_cluster(run)
    if not isinstance(data, GrowingData):
        raise RecipeError(
            f"task {run.recipe.task} keeps its data in the folder of each run, which training prepares: submit train"
        ).of("prepare.task", "task")
    print(data.summary, flush=True)
    index, report = data.reference.index, data.report
    metrics = PrepareMetrics(
        train_rows=index.rows.get(TRAIN, 0),
        validation_rows=index.rows.get(VALIDATION, 0),
        test_rows=index.rows.get(TEST, 0),
        given=report.given,
        dropped=sum(report.dropped.values()),
        dropped_by_reason=report.dropped,
        shards=sum(map(len, index.splits.values())),
        bytes=index.bytes,
    )
    return Outcome(metrics, {"data": data.reference.location})


if __name__ == "__main__":
    sys.exit(main("prepare", prepare))
