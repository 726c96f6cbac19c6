"""What tasks support, the keys of a recipe that need it, and the refusal of a key that a task does not support."""

from collections.abc import Iterator, Set
from typing import Any, Literal, TypeAlias, get_args

from app.config import BUILT_IN_TASKS, Recipe
from app.errors import RecipeError
from app.import_string import import_attribute

Feature: TypeAlias = Literal[
    "audio", "audio augmentation", "balanced sampling", "blocks", "buckets", "cascade", "class weights",
    "conversations", "curriculum", "curriculum by column", "curriculum by loss", "features", "fields", "groups",
    "image", "image augmentation", "input column", "kinds of columns", "label column", "label noise",
    "label separator", "label smoothing", "linear baseline", "mixup", "near duplicates", "pairs", "pipeline",
    "plain bytes", "pretrained model", "shards", "sources", "stream", "tags", "teacher", "tensor parallelism",
    "test split", "text augmentation", "text filters", "token batches", "tokenizer",
]  # fmt: skip
Features: TypeAlias = frozenset[Feature]
FEATURES: Features = frozenset(get_args(Feature))

# Sets that several tasks share.
PREPARED: Features = frozenset({"shards", "sources", "groups", "test split", "label column", "curriculum"})
"""What ``ServedTask.prepare`` gives."""
MODEL: Features = frozenset({"pretrained model", "tensor parallelism", "pipeline"})
CLASSES: Features = frozenset(
    {"label smoothing", "class weights", "balanced sampling", "curriculum by loss", "teacher", "cascade"}
)
TEXTS: Features = frozenset(
    {
        *("input column", "buckets", "tokenizer", "token batches", "text filters", "near duplicates"),
        *("text augmentation", "curriculum by column"),
    }
)
IMAGES: Features = frozenset({"input column", "image", "image augmentation"})
ROWS: Features = frozenset({"features", "kinds of columns"})
RECORDS: Features = frozenset({"fields", "kinds of columns", "buckets", "tokenizer", "image", "audio"})
READ: Features = RECORDS | ROWS | {"input column", "label separator", "audio augmentation"}
"""For tasks of one's own: processor and targets may read any key, and their inputs say what can be masked."""

_NEEDS: dict[str, Feature] = {
    "data.shards": "shards",
    "data.stream": "stream",
    "data.stream.labels": "label column",
    "data.sources": "sources",
    "data.group_column": "groups",
    "data.test_fraction": "test split",
    "data.test_source": "test split",
    "data.clean.min_length": "text filters",
    "data.clean.max_length": "text filters",
    "data.clean.max_symbol_share": "text filters",
    "data.clean.languages": "text filters",
    "data.clean.near_duplicates": "near duplicates",
    "data.clean.label_noise": "label noise",
    "data.columns.input": "input column",
    "data.columns.label": "label column",
    "data.columns.separator": "label separator",
    "data.columns.features": "features",
    "data.columns.categories": "kinds of columns",
    "data.columns.numbers": "kinds of columns",
    "data.columns.fields": "fields",
    "data.columns.anchor": "pairs",
    "data.columns.positive": "pairs",
    "data.columns.tokens": "tags",
    "data.columns.tags": "tags",
    "data.columns.tag_names": "tags",
    "data.columns.spans": "tags",
    "data.tokenizer.kind": "plain bytes",
    "data.tokenizer.vocab_size": "tokenizer",
    "data.tokenizer.max_piece_length": "tokenizer",
    "data.image": "image",
    "data.audio": "audio",
    "data.buckets": "buckets",
    "data.block_length": "blocks",
    "data.chat.packing": "conversations",
    "data.chat.template": "conversations",
    "data.sampling": "balanced sampling",
    "model.pretrained": "pretrained model",
    "train.tokens_per_batch": "token batches",
    "train.label_smoothing": "label smoothing",
    "train.class_weights": "class weights",
    "train.temperature": "pairs",
    "train.teacher": "teacher",
    "train.curriculum": "curriculum",
    "train.curriculum.column": "curriculum by column",
    "train.curriculum.model": "curriculum by loss",
    "train.augment.image": "image augmentation",
    "train.augment.text": "text augmentation",
    "train.augment.audio": "audio augmentation",
    "train.augment.mix": "mixup",
    "train.linear_baseline": "linear baseline",
    "train.plan.tensor": "tensor parallelism",
    "train.plan.pipeline": "pipeline",
    "serve.cascade": "cascade",
}
"""The feature that a task must support before a recipe may set a key."""


def require_supported(recipe: Recipe, supports: Set[Feature]) -> None:
    """Refuse the recipe's first key that its task does not support. Raises RecipeError."""
    for key, value in _set_keys(recipe):
        if (feature := _NEEDS[key]) not in supports:
            able = ", ".join(name for name, place in BUILT_IN_TASKS.items() if feature in supports_of(place))
            own = f", or add {feature!r} to the task's supports" if ":" in recipe.task else ""
            raise RecipeError(
                f"{key} is {value!r}, which task {recipe.task} does not support"
                f"{f' (these do: {able})' if able else ''}: leave it out{own}"
            )


def supports_of(import_string: str) -> Features:
    """Return what a class of task supports."""
    supports: Features = import_attribute(import_string).supports
    return supports


def _set_keys(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Yield the keys of ``_NEEDS`` whose value is not the default. A stored recipe holds every key."""
    for key in _NEEDS:
        *parents, name = key.split(".")
        section: Any = recipe
        for parent in parents:
            section = section and getattr(section, parent)
        if section is not None and (value := getattr(section, name)) != type(section).model_fields[name].default:
            yield key, value
