"""Compile a recipe's trained model and publish it: python -m jobs.compile RECIPE [key=value …]"""

import platform
import sys
import tempfile
from pathlib import Path

from pydantic import BaseModel
from upath import UPath

from app.checksums import sha256_of, verify_checksums
from app.code_revision import code_revision
from app.compile.export import export_onnx
from app.compile.variants import Reference, Variant, measure, pytorch_reference
from app.data.classification import ClassificationData, save_labels
from app.engines.base import EngineSettings, Signature
from app.engines.onnxruntime import OnnxRuntimeEngine
from app.engines.openvino import OpenVinoEngine
from app.errors import CompileError, StorageError
from app.repository.manifest import MODEL_FILE, EngineKey, Lineage, Manifest, ModelCard, ServingDefaults, Tensor
from app.repository.repository import Repository
from app.runs import Outcome, Run, latest_result
from app.storage import write_atomically
from app.tasks import find_processor
from app.training.run_folder import DATA, WEIGHTS
from app.training.weights import TrainedModel, load_weights
from jobs._runner import main


class CompileMetrics(BaseModel):
    """Every variant that was measured, and the one that was published."""

    variants: list[Variant]
    chosen: Variant


def compile_model(run: Run) -> Outcome:
    """Export the weights, prove them equal to PyTorch on the validation split, publish a version."""
    find_processor(run.recipe.task)  # refuses a task that cannot be compiled
    weights = _weights_folder(run)
    trained = load_weights(weights)
    if trained.recipe.task != run.recipe.task:
        raise CompileError(
            f"the weights {str(weights)!r} are of task {trained.recipe.task}, the recipe {run.recipe.name!r} is of "
            f"{run.recipe.task}: give weights of this recipe"
        )
    data = _validation_data(weights, trained)
    print(f"weights {weights}: checksums hold", flush=True)
    run.open()
    reference = pytorch_reference(trained.model, data.validation)
    print(f"PyTorch on {len(data.validation):,} validation samples: accuracy {reference.accuracy:.4f}", flush=True)
    with tempfile.TemporaryDirectory(prefix="rayloom-compile-") as temporary:
        files = UPath(temporary)
        export_onnx(trained.model, trained.processor.inputs, reference.inputs[0], Path(temporary) / MODEL_FILE)
        trained.processor.save(files)
        save_labels(trained.labels, files)
        metrics, signature = _measure(run, Path(temporary) / MODEL_FILE, reference)
        manifest = _publish(run, files, metrics.chosen, signature, trained, weights, data)
    print(f"published {manifest.name}, version {manifest.version}, now in production", flush=True)
    return Outcome(metrics, {"model": f"{manifest.name}/{manifest.version}", "report": str(run.folder / "report.json")})


def _weights_folder(run: Run) -> UPath:
    config = run.recipe.compile
    if config.weights is not None:
        return UPath(config.weights)
    return UPath(latest_result(run.storage, "train", run.recipe.name).artifacts["weights"])


def _validation_data(weights: UPath, trained: TrainedModel) -> ClassificationData:
    folder = weights.parent / DATA
    if weights.name != WEIGHTS or not folder.exists():
        raise StorageError(
            f"{str(weights)!r} has no prepared data beside it: give the {WEIGHTS} folder inside a train run's folder"
        )
    verify_checksums(folder)
    return ClassificationData.load(folder, type(trained.processor))


def _measure(run: Run, model: Path, reference: Reference) -> tuple[CompileMetrics, Signature]:
    """Measure every engine, keep the report, and choose; refuse to publish what does not hold.

    Returns the signature of the chosen variant beside the numbers.
    """
    settings, config = EngineSettings(threads=run.recipe.serve.threads), run.recipe.compile
    variants: list[Variant] = []
    signatures: dict[str, Signature] = {}
    for precision in config.precisions:
        for engine in (OnnxRuntimeEngine(model, settings), OpenVinoEngine(model, settings)):
            variants.append(measure(engine, precision, model.stat().st_size, reference, config.gates))
            signatures[engine.name] = engine.signature
            engine.close()
            print(variants[-1], flush=True)
    chosen = next(variant for variant in variants if variant.engine == OpenVinoEngine.name)
    metrics = CompileMetrics(variants=variants, chosen=chosen)
    write_atomically(run.folder / "report.json", metrics.model_dump_json(indent=1).encode())
    for variant in variants:
        if not variant.passed:
            raise CompileError(
                f"{variant}: the gates are compile.gates.max_difference {config.gates.max_difference} and "
                f"max_accuracy_drop {config.gates.max_accuracy_drop} from PyTorch's {reference.accuracy:.4f}; "
                "nothing was published"
            )
    return metrics, signatures[chosen.engine]


def _publish(
    run: Run,
    files: UPath,
    chosen: Variant,
    signature: Signature,
    trained: TrainedModel,
    weights: UPath,
    data: ClassificationData,
) -> Manifest:
    """Publish, and make the version the one in production: its gates hold."""
    serve = run.recipe.serve
    card = ModelCard(
        task=trained.recipe.task,
        engine_key=EngineKey(
            onnx_sha256=sha256_of((files / MODEL_FILE).read_bytes()),
            precision=chosen.precision,
            engine=chosen.engine,
            engine_version=chosen.engine_version,
            architecture=platform.machine(),
        ),
        lineage=Lineage(
            train_run=str(weights.parent),
            compile_run=str(run.folder),
            recipe=sha256_of(trained.recipe.model_dump_json().encode()),
            data_fingerprint=data.fingerprint,
            code=code_revision(),
        ),
        inputs=tuple(map(Tensor.of, signature.inputs)),
        outputs=tuple(map(Tensor.of, signature.outputs)),
        serving=ServingDefaults(
            max_batch_size=serve.batching.max_batch_size,
            timeout_us=serve.batching.timeout_us,
            replicas=serve.replicas,
            threads=serve.threads,
        ),
        accuracy=chosen.accuracy,
        max_difference=chosen.max_difference,
    )
    repository = Repository(run.storage)
    manifest = repository.publish(run.recipe.name, files, card)
    repository.promote(run.recipe.name, manifest.version)
    return manifest


if __name__ == "__main__":
    sys.exit(main("compile", compile_model))
