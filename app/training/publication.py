"""A training run after its workers: the weights of its best epoch are published, and its outcome is returned."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from upath import UPath

from app.artifacts import ADAPTER, CHECKPOINTS, DATA, METRICS_FILE, WEIGHTS
from app.best_effort import attempt
from app.config import TrainConfig, load_stored_recipe
from app.config.metrics import Selection
from app.data.prepared import PreparedData
from app.errors import StorageError
from app.pages.page import REPORT_FILE
from app.planner.cluster import Cluster, local_cluster
from app.published.weights import convert_weights, publish_weights
from app.runs import CONFIG_FILE, Outcome, Run
from app.storage import to_path
from app.tasks import find_task, load_prepared
from app.telemetry.profiler import PROFILE
from app.training.checkpoints.reader import export_weights
from app.training.checkpoints.store import Checkpoint, CheckpointStore
from app.training.evaluation import write_evaluation
from app.training.planning.outcome import prediction_of
from app.training.records import Ending, EpochRecord, StoppedTrainMetrics, TrainMetrics, ranked, require_finite
from app.training.stop_request import StopRequest


def finish_run(
    run: Run, data: PreparedData, ending: Ending, find_cluster: Callable[[TrainConfig], Cluster] = local_cluster
) -> Outcome:
    """Publish the weights of the best epoch, and return the outcome. After a stop request, return the progress.

    Raises:
        NonFiniteLossError: no epoch has a finite validation loss and metric.
        StorageError: no checkpoint of a whole epoch is intact.
    """
    recipe, store = run.recipe, CheckpointStore(run.folder / CHECKPOINTS)
    report = str(run.folder / REPORT_FILE)
    if ending.stop_request is not StopRequest.NONE:
        verb = "paused" if ending.stop_request is StopRequest.PAUSE else "stopped"
        print(f"{verb} at step {ending.step:,}; to go on: train.resume={run.run_id}", flush=True)
        metrics = StoppedTrainMetrics(steps=ending.step, epochs=len(ending.records), paused=verb == "paused")
        # The newest one, because a step can be saved twice.
        saved = next(checkpoint for checkpoint in reversed(store.committed()) if checkpoint.step == ending.step)
        return Outcome(metrics, {"checkpoint": str(store.folder_of(saved)), "report": report}, status="stopped")
    selection = find_task(recipe.task).selection(recipe.train)
    best, checkpoint = _best_intact(store, ending.records, selection)
    require_finite(best, selection)
    weights = run.folder / WEIGHTS
    adapter = run.folder / ADAPTER if recipe.model.adapter else None
    publish_weights(partial(export_weights, checkpoint), data, recipe, weights, adapter)
    # The weights are published. What follows is for the report, and cannot fail the run.
    evaluation, judgement = None, None
    if recipe.train.report_samples:
        evaluate = partial(write_evaluation, weights, data, recipe, run.folder, best.metrics)
        evaluation = attempt(evaluate, "the report has no predictions and no verdict", "the job")
        judgement = evaluation.judgement if evaluation else None
    cluster, steps, profile = partial(find_cluster, recipe.train), run.folder / METRICS_FILE, run.folder / PROFILE
    predict = partial(prediction_of, recipe, data, ending.workers, cluster, steps, profile)
    prediction = attempt(predict, "what the planner predicts of this run cannot be computed")
    reached = TrainMetrics.of(best, ending, recipe.train, judgement, prediction)
    if evaluation and evaluation.closing_line:
        # The last line is read first.
        print(evaluation.closing_line, flush=True)
    artifacts = {"checkpoint": str(checkpoint), "weights": str(weights), "report": report}
    return Outcome(reached, artifacts | ({"adapter": str(adapter)} if adapter else {}))


def export_checkpoint(
    run_folder: UPath, output: UPath, step: int | None = None, for_transformers: bool = False
) -> Checkpoint:
    """Write the weights folder of a run's checkpoint of ``step``. None: of the newest intact checkpoint.

    The run may be under way, or have ended in any way. ``for_transformers`` writes ``app.models.gpt`` in Hugging Face's
    layout instead.

    Raises:
        StorageError: the run has no such checkpoint, or no intact one, or ``output`` exists.
    """
    if output.exists():
        raise StorageError(f"{str(output)!r} exists: give a folder that does not").of("folder.taken")
    store = CheckpointStore(run_folder / CHECKPOINTS)
    chosen = store.newest_intact() if step is None else store.intact_of(step)
    if chosen is None:
        raise StorageError(f"run {run_folder.name} has no checkpoint: let it train until it has one").of(
            "checkpoints.none"
        )
    recipe = load_stored_recipe(str(run_folder / CONFIG_FILE))
    data = load_prepared(recipe, run_folder / DATA)
    export = partial(export_weights, store.folder_of(chosen))
    if not for_transformers:
        adapter = output / ADAPTER if recipe.model.adapter else None
        publish_weights(export, data, recipe, output, adapter)
        return chosen
    with tempfile.TemporaryDirectory(prefix="rayloom-export-") as temporary:
        publish_weights(export, data, recipe, to_path(temporary))
        convert_weights(Path(temporary), output)
    return chosen


def _best_intact(store: CheckpointStore, records: list[EpochRecord], selection: Selection) -> tuple[EpochRecord, UPath]:
    """Return the best epoch that has an intact checkpoint, and the folder of that checkpoint."""
    kept = {checkpoint.step: checkpoint for checkpoint in store.committed()}
    for record in ranked([record for record in records if record.step in kept], selection):
        # A damaged checkpoint costs an epoch, not the run.
        if store.is_intact(kept[record.step]):
            return record, store.folder_of(kept[record.step])
    raise StorageError(
        f"no checkpoint of a whole epoch in {str(store.folder)!r} is intact: restore one, or train "
        "its epochs again with train.resume=latest"
    ).of("checkpoints.damaged")
