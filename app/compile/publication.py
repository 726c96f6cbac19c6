"""Publish the chosen variant as a version in the repository, and promote it to production."""

import tempfile
from pathlib import Path

from upath import UPath

from app.artifacts import WEIGHTS_FILE
from app.checksums import sha256_of_file
from app.compile.choice import Choice
from app.compile.compilation import Compilation
from app.compile.onnx_files import files_of
from app.compile.records import VariantRecord
from app.compile.reference import Reference
from app.engines.architecture import architecture_of
from app.engines.tensorrt.manifest import manifest_path
from app.repository.known_answers import KnownAnswers
from app.repository.manifest import (
    MODEL_FILE,
    PLAN_FILE,
    EngineKey,
    Manifest,
    ModelCard,
)
from app.repository.repository import Repository
from app.storage import link, to_path
from app.tensors import Tensor

_KNOWN_ROWS = 4


def publish(
    compilation: Compilation,
    choice: Choice,
    name: str,
    repository: Repository,
    compile_run: UPath,
) -> Manifest:
    """Publish the files of the chosen variant, which passes its gates, and promote the version to production."""
    with tempfile.TemporaryDirectory(prefix="rayloom-version-") as temporary:
        files = to_path(temporary)
        for target, source in _model_files(compilation, choice.record).items():
            if choice.record.runs_module:
                # A run's files belong to the user. What is written to a second name would change them.
                source.copy(files / target)
            else:
                # A second name of compile's own file takes no room on the disk.
                link(source, files / target)
        compilation.source_model.save_codec(files)
        # A replica compares its engine with these before it serves.
        _known_answers(compilation.source_model.reference).save(Path(temporary))
        manifest = repository.publish(name, files, _card(compilation, choice, compile_run, Path(temporary)))
    # Written last, when all files of the version are in the repository.
    repository.promote(name, manifest.version)
    return manifest


def _model_files(compilation: Compilation, record: VariantRecord) -> dict[str, UPath]:
    """Return the files of the version by name: the ONNX file with its shards, and TensorRT's plan built from it."""
    if record.runs_module:
        return compilation.source_model.module_files()
    onnx, opened = compilation.onnx_of(record), compilation.path_of(record)
    compiled = {file.name: file for file in files_of(onnx)}
    if opened != onnx:
        compiled |= {PLAN_FILE: opened, manifest_path(Path(PLAN_FILE)).name: manifest_path(opened)}
    return {name: to_path(file) for name, file in compiled.items()}


def _known_answers(reference: Reference) -> KnownAnswers:
    """Return the first rows of the reference and their outputs."""
    batch, outputs = next(reference.batches(_KNOWN_ROWS))
    return KnownAnswers(batch.inputs, outputs, reference.magnitudes)


def _card(compilation: Compilation, choice: Choice, compile_run: UPath, files: Path) -> ModelCard:
    source_model, record = compilation.source_model, choice.record
    return ModelCard(
        task=source_model.task,
        engine_key=EngineKey(
            onnx_sha256=sha256_of_file(files / (WEIGHTS_FILE if record.runs_module else MODEL_FILE)),
            precision=record.precision,
            engine=record.engine,
            engine_version=record.engine_version,
            device=record.device,
            architecture=architecture_of(record.device, record.precision),
            profile=source_model.profile(compilation.config.batch_sizes),
        ),
        lineage=source_model.lineage(str(compile_run)),
        inputs=tuple(map(Tensor.of, source_model.signature.inputs)),
        outputs=tuple(map(Tensor.of, source_model.signature.outputs)),
        serving=choice.serving,
        quantization=record.quantization,
        score=choice.accuracy.score if choice.accuracy else None,
        accuracy_split=choice.accuracy.split if choice.accuracy else source_model.split,
        accuracy_rows=choice.accuracy.rows if choice.accuracy else None,
        scores=source_model.scores,
        max_difference=record.max_difference,
        scaled_difference=record.scaled_difference,
        cosine=record.cosine,
        differing_rows=record.differing_rows,
    )
