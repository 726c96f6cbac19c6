"""What the stages of a cascade have to share, so that one may answer in place of another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from app.data.classification import LABELS_FILE
from app.errors import RecipeError
from app.repository.manifest import MODEL_FILE, PLAN_FILE
from app.serving.model import LoadedModel
from app.tensors import Tensor


@dataclass(frozen=True)
class Interface:
    """How a version is asked, and what its answers mean."""

    title: str
    """As people write it: NAME/VERSION."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    labels: tuple[str, ...]
    """In the order of the logits."""

    codec: Mapping[str, str]
    """The sha256 of each file that turns natural input into tensors, such as the tokenizer's."""

    @classmethod
    def of(cls, model: LoadedModel) -> Self:
        """Of a version in memory."""
        manifest = model.manifest
        compiled = (MODEL_FILE, PLAN_FILE)  # a plan has its manifest beside it
        codec = {
            name: sha256
            for name, sha256 in manifest.files.items()
            if name != LABELS_FILE and not name.startswith(compiled)
        }
        return cls(f"{manifest.name}/{manifest.version}", manifest.inputs, manifest.outputs, tuple(model.labels), codec)


def require_alike(interfaces: Sequence[Interface]) -> None:
    """Refuse stages of which one cannot answer in place of the last. Raises RecipeError that says what differs."""
    *earlier, last = interfaces
    for each in earlier:
        if difference := _difference(each, last):
            raise RecipeError(
                f"{each.title} and {last.title} cannot be stages of one cascade: {difference}; train and compile both "
                "with the same data section"
            )


def _difference(one: Interface, other: Interface) -> str | None:
    for verb, mine, theirs in (
        ("takes", _listed(one.inputs), _listed(other.inputs)),
        ("answers", _listed(one.outputs), _listed(other.outputs)),
        ("has the labels", ", ".join(one.labels), ", ".join(other.labels)),
    ):
        if mine != theirs:
            return f"{one.title} {verb} {mine}, and {other.title} {theirs}"
    files = sorted(name for name in {*one.codec, *other.codec} if one.codec.get(name) != other.codec.get(name))
    return f"they read their inputs differently, by another {', '.join(files)}" if files else None


def _listed(tensors: Sequence[Tensor]) -> str:
    return ", ".join(map(str, sorted(tensors, key=lambda each: each.name)))
