"""Checks that the stages of a cascade can answer in place of each other."""

from collections.abc import Sequence

from app.artifacts import ARCHITECTURE_FILE, RECIPE_FILE, WEIGHTS_FILE
from app.data.targets import LABELS_FILE, Classes
from app.errors import RecipeError
from app.published.loaded import LoadedModel
from app.repository.known_answers import ANSWERS_FILE
from app.repository.manifest import MODEL_FILE, PLAN_FILE, Manifest

_ENGINES = (MODEL_FILE, PLAN_FILE, WEIGHTS_FILE, ARCHITECTURE_FILE, RECIPE_FILE)
"""Prefixes of the files that engines read. A TensorRT plan has its manifest beside it."""


def require_alike(models: Sequence[LoadedModel]) -> None:
    """Raise RecipeError, which names the difference, if a stage cannot answer in place of the last."""
    *earlier, last = models
    if not isinstance(last.targets, Classes):
        raise RecipeError(
            f"serve.cascade: {last.manifest.name}/{last.version} gives no probability of one label, by which a stage "
            "knows whether it is sure: leave the cascade out"
        ).of("cascade.no_probability", "serve.cascade")
    for model in earlier:
        if difference := _difference(model, last):
            raise RecipeError(
                f"serve.cascade.before: {model.manifest.name}/{model.version} {difference}, as "
                f"{last.manifest.name}/{last.version}, the last stage: train both with the same data section"
            ).of("versions.differ", "serve.cascade.before")


def read_alike(models: Sequence[LoadedModel]) -> bool:
    """Return whether the same tensors mean the same to all models: they share the tokenizer or other encoder."""
    # The encoders are compared by their files' hashes: equal files encode equally.
    return len({_codec(model.manifest) for model in models}) == 1


def _difference(model: LoadedModel, last: LoadedModel) -> str | None:
    manifest, last_manifest = model.manifest, last.manifest
    if difference := manifest.signature.difference(last_manifest.signature):
        return difference
    if model.labels != last.labels:
        return f"has the labels {', '.join(model.labels)}, expected {', '.join(last.labels)}"
    # Otherwise a stage may have been trained on the rows that calibrate it.
    if manifest.lineage.data_fingerprint != last_manifest.lineage.data_fingerprint:
        return "was trained on other data, or split in another way, so that no rows are new to both; expected the same"
    return None


def _codec(manifest: Manifest) -> frozenset[tuple[str, str]]:
    """Return name and sha256 of each file that is needed to encode natural input."""
    return frozenset(
        (name, sha256)
        for name, sha256 in manifest.files.items()
        # Labels are compared by themselves. Answers and engines differ between any two versions.
        if name not in (LABELS_FILE, ANSWERS_FILE) and not name.startswith(_ENGINES)
    )
