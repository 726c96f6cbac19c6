"""A whole training run, whoever runs it: what comes before the workers, and what comes after."""

from upath import UPath

from app.data.baseline import LINEAR_BASELINE, linear_baseline
from app.data.prepared import PreparedData, prepare
from app.errors import RecipeError
from app.models.factory import build_model
from app.runs import Outcome, Run
from app.tasks import find_processor
from app.training.loop import count_steps
from app.training.records import EpochRecord, TrainMetrics
from app.training.run_folder import WEIGHTS
from app.training.weights import publish_weights


def prepare_run(run: Run) -> PreparedData:
    """Prepare the data and check all that can be checked before a worker starts; nothing is written.

    Raises:
        RecipeError: the task or the model cannot be had as the recipe says.
        DataError: the data cannot be read, or is not what the recipe says.
        TrainingError: there are fewer samples than one batch takes.
    """
    recipe = run.recipe
    data = prepare(recipe.data, find_processor(recipe.task))
    print(f"data {recipe.data.source}: {data.report}", flush=True)
    print(f"training on {len(data.train):,} examples, validating on {len(data.validation):,}", flush=True)
    model = build_model(recipe.model, len(data.labels), data.processor)
    print(f"model {recipe.model.factory}: {sum(each.numel() for each in model.parameters()):,} parameters", flush=True)
    count_steps(recipe.train, len(data.train))
    if recipe.train.linear_baseline and data.processor.modality != "text":
        raise RecipeError("train.linear_baseline is for texts: set it to false")
    return data


def finish_run(run: Run, data: PreparedData, best: EpochRecord, last: EpochRecord, checkpoint: UPath) -> Outcome:
    """Keep the weights of the best epoch's checkpoint, and say what was reached."""
    recipe, weights = run.recipe, run.folder / WEIGHTS
    publish_weights(checkpoint, data, recipe, weights)
    baseline = linear_baseline(data) if recipe.train.linear_baseline else None
    if baseline is not None:
        print(f"val_accuracy {best.val_accuracy:.4f}; {LINEAR_BASELINE}: {baseline:.4f}", flush=True)
    metrics = TrainMetrics.of(best, last, recipe.train, baseline)
    return Outcome(metrics, {"checkpoint": str(checkpoint), "weights": str(weights)})
