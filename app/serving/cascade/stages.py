"""What the stages of a cascade have in common, so that one may answer in place of another."""

from collections.abc import Sequence

from app.artifacts import ARCHITECTURE_FILE, RECIPE_FILE, WEIGHTS_FILE
from app.data.classification import LABELS_FILE
from app.errors import RecipeError
from app.repository.known_answers import ANSWERS_FILE
from app.repository.manifest import MODEL_FILE, PLAN_FILE, Manifest
from app.serving.model.loaded import LoadedModel

_ENGINES = (MODEL_FILE, PLAN_FILE, WEIGHTS_FILE, ARCHITECTURE_FILE, RECIPE_FILE)
"""What engines read of a version; a plan has its manifest beside it."""


def require_alike(models: Sequence[LoadedModel]) -> None:
    """Refuse stages that cannot answer in place of the last. Raises RecipeError that says what differs."""
    *earlier, last = models
    for each in earlier:
        if difference := _difference(each, last):
            raise RecipeError(
                f"serve.cascade.before: {each.manifest.name}/{each.version} {difference}, as "
                f"{last.manifest.name}/{last.version}, the last stage: train both with the same data section"
            )


def read_alike(models: Sequence[LoadedModel]) -> bool:
    """Whether the same tensors mean the same to all: they have the same tokenizer, or whatever makes the tensors."""
    return len({_codec(model.manifest) for model in models}) == 1


def _difference(model: LoadedModel, last: LoadedModel) -> str | None:
    mine, others = model.manifest, last.manifest
    if difference := mine.signature.difference(others.signature):
        return difference
    if model.labels != last.labels:
        return f"has the labels {', '.join(model.labels)}, expected {', '.join(last.labels)}"
    if mine.lineage.data_fingerprint != others.lineage.data_fingerprint:
        return "was trained on other data, or split in another way, so that no rows are new to both; expected the same"
    return None


def _codec(manifest: Manifest) -> frozenset[tuple[str, str]]:
    """Name and sha256 of each file that turns natural input into tensors."""
    return frozenset(
        (name, sha256)
        for name, sha256 in manifest.files.items()
        if name not in (LABELS_FILE, ANSWERS_FILE) and not name.startswith(_ENGINES)
    )
