"""Compile a language model on this machine, and publish it."""

import tempfile
from pathlib import Path

from upath import UPath

from app.checksums import sha256_of_file
from app.compile.files import Log
from app.compile.generation.architectures import CacheShape, context_length_of
from app.compile.generation.compilation import GenerationChoice, GenerationCompilation
from app.compile.generation.records import GenerationMetrics
from app.compile.generation.report import report_of, write_report
from app.compile.generation.source import GenerationSource, imported_source, trained_source
from app.compile.generation.timing import STREAMS
from app.compile.generation.variants import RequestedPrecisions, requested_precisions
from app.config import Recipe
from app.engines.architecture import architecture_of, usable_cores
from app.engines.base import ShapeProfile
from app.engines.generation.registry import open_generation
from app.errors import RayloomError
from app.heartbeat import run_lock
from app.repository.manifest import GENERATION_FILES, EngineKey, Generation, Manifest, ModelCard
from app.repository.repository import Repository
from app.runs import Outcome, Run
from app.storage import to_path
from app.telemetry.tracing import stage
from app.tensors import OUTPUT, Tensor


def compile_trained(run: Run, weights: UPath, log: Log) -> Outcome:
    """Make every variant of a trained language model, check its gates, time it, and publish the best.

    Raises:
        RayloomError: the recipe or the weights are refused, before a run is opened. Or no variant passes the gates and
            meets the objective. The report says why.
    """
    requested = _requested(run.recipe)
    with tempfile.TemporaryDirectory(prefix="rayloom-compile-") as temporary:
        source = trained_source(weights, run.recipe, Path(temporary), usable_cores())
        return _compile(run, source, requested, Path(temporary), log)


def compile_imported(run: Run, given: Path, samples: Path | None, log: Log) -> Outcome:
    """Publish a language model that was trained elsewhere, by the same gates. Raises RayloomError as above."""
    requested = _requested(run.recipe)
    with tempfile.TemporaryDirectory(prefix="rayloom-import-") as temporary:
        source = imported_source(given, samples, run.recipe, usable_cores())
        if not source.has_chat:
            log(f"{str(given)!r} has no chat template, so it answers no chats: add chat_template.jinja to the folder")
        return _compile(run, source, requested, Path(temporary), log)


def _requested(recipe: Recipe) -> RequestedPrecisions:
    """Return the precisions of a recipe. Raises RayloomError if this machine does not have their engine."""
    requested = requested_precisions(recipe)
    open_generation(requested.engine, Path())
    return requested


def _compile(run: Run, source: GenerationSource, requested: RequestedPrecisions, folder: Path, log: Log) -> Outcome:
    """Measure every variant, and publish the best. Write the report in any case. Raises RayloomError."""
    compilation = GenerationCompilation(source, run.recipe.compile, requested, folder / "variants", log)
    # All refusals come before this point, so that they leave no run behind.
    run.open()
    length = context_length_of(source.model.config)
    log(f"a {source.model.config.model_type} of {length:,} tokens, compared on {compilation.documents:,} documents")
    with run_lock(run.folder):
        try:
            with stage("variants"):
                compilation.evaluate()
            with stage("measure"):
                choice = compilation.choose()
        except RayloomError as error:
            # The measurements are useful even if no variant is chosen.
            write_report(report_of(compilation, run.recipe.name, None, str(error)), run.folder)
            raise
        log(f"chosen, by {run.recipe.compile.objective}: {choice.point}")
        published = choice.published
        log(f"published {published.score if published else 'perplexity: not known, because there are no texts'}")
        # Before publishing, so that the measurements survive a failure there.
        page = write_report(report_of(compilation, run.recipe.name, choice), run.folder)
        manifest = _publish(compilation, choice, run)
        log(f"published {manifest.name}, version {manifest.version}, now in production: {manifest.engine_key}")
    assert manifest.generation is not None
    metrics = GenerationMetrics(
        variants=compilation.records,
        skipped=compilation.skipped,
        points=compilation.points,
        chosen=choice.record,
        point=choice.point,
        serving=choice.serving,
        accuracy=published and published.score,
        generation=manifest.generation,
    )
    return Outcome(metrics, {"model": f"{manifest.name}/{manifest.version}", "report": str(page)})


def _publish(compilation: GenerationCompilation, choice: GenerationChoice, run: Run) -> Manifest:
    """Publish the files of the chosen variant, and promote the version to production."""
    files, repository = compilation.folder_of(choice.record.precision), Repository(run.storage)
    card = card_of(compilation.source, choice, str(run.folder), files)
    manifest = repository.publish(run.recipe.name, to_path(files), card)
    # Last, because all files of the version must be in the repository.
    repository.promote(run.recipe.name, manifest.version)
    return manifest


def card_of(source: GenerationSource, choice: GenerationChoice, compile_run: str, files: Path) -> ModelCard:
    """Return the card of the chosen variant, whose files are in ``files``."""
    config, record, published = source.model.config, choice.record, choice.published
    length, vocabulary = context_length_of(config), int(config.vocab_size)
    return ModelCard(
        task=source.task,
        engine_key=EngineKey(
            onnx_sha256=sha256_of_file(files / GENERATION_FILES[record.engine]),
            precision=record.precision,
            engine=record.engine,
            engine_version=record.engine_version,
            device=record.device,
            architecture=architecture_of(record.device, record.precision),
            profile=ShapeProfile(batch_sizes=STREAMS, lengths=(length,)),
        ),
        lineage=source.lineage(compile_run),
        inputs=(Tensor(name="input_ids", dtype="int64", shape=(-1, -1)),),
        outputs=(Tensor(name=OUTPUT, dtype="float32", shape=(-1, -1, vocabulary)),),
        serving=choice.serving,
        generation=Generation(
            context_length=length,
            vocab_size=vocabulary,
            end_ids=source.end_ids,
            has_chat=source.has_chat,
            cache_bytes_per_token=CacheShape.of(config).bytes_per_token // (2 if record.precision == "bf16" else 1),
            perplexity=published and published.perplexity,
            baseline_perplexity=published and published.baseline,
            greedy=choice.greedy,
            speculation=record.speculation,
        ),
        score=published and published.score.score,
        accuracy_split=published.score.split if published else source.split,
        accuracy_rows=published and published.score.rows,
        scores=None,
        max_difference=record.max_difference,
        scaled_difference=record.scaled_difference,
        cosine=record.cosine,
    )
