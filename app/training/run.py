"""A training run before its workers: it is prepared, checked and opened."""

from collections.abc import Callable
from functools import partial

from torch import nn
from upath import UPath

from app.artifacts import CHECKPOINTS, DATA, FAILURE_FILE
from app.best_effort import best_effort, warn
from app.checksums import CHECKSUMS_FILE, verify_checksums
from app.config import AutoPlan, Recipe, TrainConfig, refusal
from app.config.layout import MAX_MICRO_BATCH
from app.data.labelled import LabelledDataset
from app.data.prepared import DataReport, PreparedData
from app.errors import RecipeError, StorageError
from app.heartbeat import run_lock
from app.models.blueprint import Blueprint
from app.models.factory import blueprint_of
from app.models.pretrained import described, match_weights
from app.models.traits import require_apart, traits_of
from app.planner.cluster import Cluster, local_cluster
from app.reports.run_folder import write_page
from app.reports.training import training_page
from app.runs import Run
from app.tasks import find_task, load_prepared, load_with_test, prepare
from app.training.augmented_samples import augmented_samples
from app.training.checkpoints.store import CheckpointStore
from app.training.data.mixture import Mixture
from app.training.engine.batch_norm import has_batch_norm, has_mixed_batch_norm
from app.training.engine.nvme import require_asynchronous_io
from app.training.plan import TrainingPlan
from app.training.planning.auto import choose_plan
from app.training.resume import require_unfinished
from app.training.sources import planned_periods, record_mixture, with_added_sources
from app.training.stop_request import withdraw_stop_request, written_request


def prepare_run(
    run: Run, find_cluster: Callable[[TrainConfig], Cluster] = local_cluster, prepared: UPath | None = None
) -> tuple[TrainingPlan, PreparedData]:
    """Return the plan of a run and its data, once all has been checked that can be. Change and write nothing.

    The plan's recipe has a parallel plan in place of ``auto``, so that a resumed run keeps it. It also has the
    configuration of a pretrained model, so that the model can be built without its folder. A run that has a checkpoint
    does not open the folder.

    Args:
        run: the run, whose folder may not exist yet.
        find_cluster: describes the machines that the run trains on.
        prepared: folder of data that another job has prepared for this recipe. None: prepare it.

    Raises:
        PlanError: the plan is ``auto``, and none fits.
        RecipeError: the recipe's task, model or plan is invalid.
        DataError: the data cannot be read, or does not match the recipe.
        TrainingError: there are fewer samples than one batch takes.
    """
    recipe = run.recipe
    find_task(recipe.task).require(recipe)
    reads_folder = recipe.model.pretrained is not None and not CheckpointStore(run.folder / CHECKPOINTS).committed()
    if reads_folder:
        # Before the data, so that their tokenizer is of the same commit as the weights.
        recipe = recipe.with_model(described(recipe.model))
    data = _data_of(run, recipe, prepared)
    print(f"data {recipe.data.source}: {f'as prepared in {prepared}' if prepared else data.summary}", flush=True)
    blueprint = _blueprint_of(recipe, data, reads_folder)
    if isinstance(recipe.train.plan, AutoPlan):
        chosen = choose_plan(recipe, blueprint, data, partial(find_cluster, recipe.train))
        print(f"train.plan auto: {chosen.reason}", flush=True)
        recipe = recipe.with_plan(chosen.plan)
        find_task(recipe.task).require(recipe)  # the planner does not know what a task supports
    _check_model(recipe, blueprint.model, data)
    if recipe.train.teacher:
        from app.training.teacher import with_resolved_teacher  # imports an engine, which other runs do not need

        recipe = with_resolved_teacher(recipe, data, run.storage)
    if recipe.train.curriculum:
        from app.training.difficulty import require_difficulty  # other runs do not need it

        recipe = require_difficulty(recipe, data, run.folder)
    plan = TrainingPlan.of(recipe, data, planned_periods(recipe, run.folder, data))
    _describe(plan, data)
    return plan, data


def _describe(plan: TrainingPlan, data: PreparedData) -> None:
    """Print how training differs from the default, and warn if that is costly."""
    config = plan.recipe.train
    if mixture := Mixture.of(plan.recipe.data, data):
        last = plan.periods[-1]
        since = f" from batch {last.number:,} of epoch {last.epoch} on" if len(plan.periods) > 1 else ""
        print(f"data.sources{since}: {mixture} of an epoch", flush=True)
    if tokens := config.tokens_per_batch:
        mean = len(data.train) / plan.epoch_batches
        print(f"train.tokens_per_batch {tokens:,}: {plan.epoch_batches:,} batches of {mean:.1f} samples on average")
    if message := skipped_workers(config):
        print(message, flush=True)
    layout = config.layout(config.worker_counts[-1])
    is_uneven = config.tokens_per_batch is None and config.plan.micro_batch is None
    if is_uneven and 2 * layout.micro_batch < min(layout.share, MAX_MICRO_BATCH):
        warn(
            f"each rank computes its {layout.share} samples of a step as {layout.gradient_accumulation} micro-batches "
            f"of {layout.micro_batch}, since tensor and pipeline parallelism need micro-batches of one size: choose a "
            f"global_batch_size that gives each rank a multiple of {MAX_MICRO_BATCH} samples"
        )


def _blueprint_of(recipe: Recipe, data: PreparedData, reads_folder: bool) -> Blueprint:
    """Return the blueprint of the model, and tell where its weights come from."""
    model = recipe.model
    blueprint = blueprint_of(model, data.facts, adapted=True)
    print(f"model {model.factory or model.pretrained}: {blueprint.num_parameters:,} parameters", flush=True)
    if reads_folder:
        assert model.source is not None
        print(f"weights of {model.source}: {match_weights(blueprint.model, model.source)}", flush=True)
    if model.adapter:
        print(f"model.adapter: {blueprint.num_trained:,} parameters are trained, the others frozen", flush=True)
    return blueprint


def open_run(run: Run, plan: TrainingPlan, data: PreparedData) -> None:
    """Lock the run until its result is written, and make its folder with the data that every worker reads.

    The run gets the plan's recipe. A stop request from before this job is withdrawn.

    Raises:
        StorageError: another job has started to train it, or has trained it since it was planned.
    """
    run.hold(run_lock(run.folder))
    require_unfinished(run)
    if plan.periods != planned_periods(plan.recipe, run.folder, data):
        run.is_ours = False  # the result of the other job stays
        raise StorageError(f"run {run.run_id} has trained on while its data were prepared: submit the job again").of(
            "run.went_on"
        )
    # Registered after the lock, so it runs before the lock is released.
    run.until_result.callback(write_page, training_page, run.folder)
    run.recipe = plan.recipe
    run.open()
    # A newer request is for this job, which may have waited for its turn.
    if written_request(run.folder) == run.earlier_request:
        withdraw_stop_request(run.folder)
    # The note of an earlier attempt must not explain a later failure.
    (run.folder / FAILURE_FILE).unlink(missing_ok=True)
    if not _is_saved(run):
        data.save(run.folder / DATA)
        DataReport.of(run.recipe.data.source, data).save(run.folder)
        best_effort(partial(_show_changes, run, plan, data), "the report has no changed samples", "the job")
    if run.recipe.data.sources:
        record_mixture(run, plan.periods, data)


def _show_changes(run: Run, plan: TrainingPlan, data: PreparedData) -> None:
    """Keep samples for the run's page, as ``train.augment`` changes them, if it does."""
    if plan.augmentation is not None and isinstance(data.train, LabelledDataset):
        augmented_samples(plan.augmentation, data.train).save(run.folder)


def _data_of(run: Run, recipe: Recipe, prepared: UPath | None) -> PreparedData:
    """Return the data that the run has saved, else what is in ``prepared``, else prepare it from the source."""
    if _is_saved(run):
        verify_checksums(run.folder / DATA)
        return with_added_sources(run, recipe, load_prepared(recipe, run.folder / DATA))
    if prepared is None:
        return prepare(recipe)
    verify_checksums(prepared)
    return load_with_test(recipe, prepared)


def _is_saved(run: Run) -> bool:
    return (run.folder / DATA / CHECKSUMS_FILE).exists()


def _check_model(recipe: Recipe, model: nn.Module, data: PreparedData) -> None:
    """Raise RecipeError for a plan or keys that the model or the data cannot run."""
    config = recipe.train
    if config.prune:
        from app.training.engine.pruning import require_same_model  # other runs do not need it

        require_same_model(recipe)
    inputs = data.train.batch([0]).inputs
    # Only packed conversations come with positions.
    if "position_ids" in inputs:
        require_apart(model)
    if reason := refusal(config.plan, config.setting(traits_of(model), inputs)):
        raise RecipeError(f"train.plan: {reason}").of("plan.cannot_run", "train.plan")
    lengths = data.train.padded_lengths if config.plan.pipeline > 1 else None
    if lengths is not None and lengths.min() < lengths.max():
        raise RecipeError(
            f"train.plan.pipeline is {config.plan.pipeline}, whose stages exchange tensors of one shape, and samples "
            f"are padded to lengths from {lengths.min()} to {lengths.max()}: leave it out, or pad all to one length"
        ).of("pipeline.shapes", "train.plan.pipeline")
    if config.sync_batch_norm and not has_batch_norm(model):
        raise RecipeError(
            f"train.sync_batch_norm is true, but model {type(model).__name__} has no batch norm: leave it out"
        ).of("batch_norm.none", "train.sync_batch_norm")

    in_low_precision = config.precision != "fp32" and config.device == "cpu"
    if in_low_precision and not config.sync_batch_norm and has_mixed_batch_norm(model):
        raise RecipeError(
            f"train.precision is {config.precision}, but torch's batch norm needs fp32 weights on CPUs (model "
            f"{type(model).__name__}): set train.sync_batch_norm to true, which computes it in fp32, or "
            "train.precision to fp32"
        ).of("batch_norm.precision", "train.precision")
    if config.plan.uses_nvme:
        require_asynchronous_io()


def skipped_workers(config: TrainConfig) -> str | None:
    """Describe which numbers of workers an elastic run uses; None if all in its range can share out the batch."""
    min_workers, max_workers = config.workers_range
    counts = config.worker_counts
    if len(counts) == max_workers - min_workers + 1:
        return None
    return (
        f"train.workers [{min_workers}, {max_workers}]: {', '.join(map(str, counts))} workers can share out a global "
        f"batch of {config.batch_size}; other numbers are skipped"
    )
