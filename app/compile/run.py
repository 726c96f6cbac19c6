"""Compile a recipe's trained model on this machine, and publish it."""

import tempfile
from pathlib import Path

from pydantic import BaseModel
from upath import UPath

from app.compile.compilation import Compilation
from app.compile.files import Log
from app.compile.generation.variants import requested_precisions, require_rows
from app.compile.publication import publish
from app.compile.records import BuiltPlan, PublishedScore, VariantRecord
from app.compile.report import report_of, write_report
from app.compile.source_model import load_source_model
from app.compile.timing import OperatingPoint
from app.compile.variants import Skipped, requested_variants
from app.config import Recipe
from app.engines.architecture import usable_cores
from app.errors import RayloomError
from app.heartbeat import run_lock
from app.repository.manifest import ServingDefaults
from app.repository.repository import Repository
from app.runs import Outcome, Run, latest_result
from app.storage import to_path
from app.tasks import find_compiled_task
from app.telemetry.tracing import stage


class CompileMetrics(BaseModel):
    """Measured and skipped variants, TensorRT plans for other machines, and the published variant."""

    variants: list[VariantRecord]
    skipped: list[Skipped]
    plans: list[BuiltPlan]
    chosen: VariantRecord
    point: OperatingPoint
    serving: ServingDefaults
    accuracy: PublishedScore | None


def print_line(line: str) -> None:
    """Print a line and flush it."""
    print(line, flush=True)


def require_compilable(recipe: Recipe) -> None:
    """Check that a recipe's models can be compiled as it says, on this machine unless it chooses another node.

    Raises:
        RayloomError: the task is only trained, or a precision, an engine or a key of ``compile`` does not fit it.
    """
    if find_compiled_task(recipe.task).served_as == "tokens":
        requested_precisions(recipe)
        return
    require_rows(recipe)
    if not recipe.compile.chooses_node:
        requested_variants(recipe.compile)


def compile_model(run: Run, log: Log = print_line) -> Outcome:
    """Make every variant of the weights, compare it with the model, measure it, and publish the best.

    Args:
        log: called with each line of progress.

    Raises:
        RayloomError: the recipe or the weights are refused, before a run is opened. Or no variant passes the gates and
            meets the objective, and the report says why.
    """
    require_compilable(run.recipe)
    if find_compiled_task(run.recipe.task).served_as == "tokens":
        from app.compile.generation.run import compile_trained  # imports the engines of language models

        return compile_trained(run, find_weights(run), log)
    return _compile_rows(run, log)


def _compile_rows(run: Run, log: Log) -> Outcome:
    """Compile a model that answers rows, by comparing its variants with PyTorch."""
    config = run.recipe.compile
    requested = requested_variants(config)
    source_model = load_source_model(find_weights(run), run.recipe, usable_cores())
    if requested.calibrated:
        source_model.require_samples(config.calibration.samples)
    run.open()
    rows = len(source_model.reference.rows)
    log(
        f"weights {source_model.weights}: checksums match; PyTorch on {rows:,} validation samples"
        f"{f': {source_model.score_to_keep}' if source_model.score_to_keep else ''}"
    )
    # Not until the result is written: in a Ray task, the run is a copy of the job's.
    with run_lock(run.folder), tempfile.TemporaryDirectory(prefix="rayloom-compile-") as temporary:
        return choose_and_publish(run, Compilation(source_model, config, requested, Path(temporary), log), log)


def choose_and_publish(run: Run, compilation: Compilation, log: Log) -> Outcome:
    """Measure every variant, and publish the best. Write the report in any case. Raises RayloomError."""
    recipe = run.recipe
    try:
        with stage("variants"):
            compilation.evaluate()
        plans = _keep_plans(run, compilation)
        with stage("measure"):
            choice = compilation.choose()
    except RayloomError as error:
        # The measurements are useful even if no variant is chosen.
        write_report(report_of(compilation, recipe.name, None, str(error)), run.folder)
        raise

    baseline = compilation.baseline_of(choice.point)
    comparison = f" (PyTorch: {baseline.latency_ms:.2f} ms, {baseline.throughput:,.0f} rows/s)" if baseline else ""
    log(f"chosen, by {recipe.compile.objective}: {choice.point}{comparison}")
    log(f"published {choice.accuracy or 'score: not known, because the rows have no labels'}")

    # Before publishing, so that a failure there keeps the measurements.
    page = write_report(report_of(compilation, recipe.name, choice), run.folder)
    manifest = publish(compilation, choice, recipe.name, Repository(run.storage), run.folder)
    log(f"published {manifest.name}, version {manifest.version}, now in production: {manifest.engine_key}")

    if (published := choice.accuracy) and (judgement := published.judgement) and judgement.findings:
        log(f"warning: {manifest.name}, version {manifest.version}, is in production with {judgement.verdict}")

    metrics = CompileMetrics(
        variants=compilation.records,
        skipped=compilation.skipped,
        plans=compilation.plans,
        chosen=choice.record,
        point=choice.point,
        serving=choice.serving,
        accuracy=choice.accuracy,
    )
    return Outcome(metrics, {"model": f"{manifest.name}/{manifest.version}", "report": str(page), **plans})


def find_weights(run: Run) -> UPath:
    """Return the weights folder of the recipe, else of the newest finished train run. Raises StorageError."""
    config = run.recipe.compile
    if config.weights is not None:
        return to_path(config.weights)
    return to_path(latest_result(run.storage, "train", run.recipe.name).artifacts["weights"])


def _keep_plans(run: Run, compilation: Compilation) -> dict[str, str]:
    """Copy TensorRT plans for other machines into the run's folder. They cannot run here to be evaluated."""
    kept = {}
    for precision, plan in compilation.build_ahead():
        target = run.folder / "plans" / precision
        target.mkdir(parents=True)
        for file in plan.iterdir():
            to_path(file).copy(target / file.name)
        kept[f"plan_{precision}"] = str(target)
    return kept
