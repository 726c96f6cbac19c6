"""What tasks support, the keys of a recipe that need it, and the refusal of a key that a task does not support."""

from collections.abc import Iterator, Sequence, Set
from typing import Literal, TypeAlias, get_args

from app.config import BUILT_IN_TASKS, Recipe
from app.config.section import Section
from app.errors import RecipeError
from app.import_string import import_attribute

Feature: TypeAlias = Literal[
    "audio", "audio augmentation", "balanced sampling", "blocks", "buckets", "cascade", "class weights",
    "conversations", "curriculum", "curriculum by column", "curriculum by loss", "features", "fields", "groups",
    "image", "image augmentation", "input column", "kinds of columns", "label column", "label noise",
    "label separator", "label smoothing", "linear baseline", "mixup", "named labels", "near duplicates", "pairs",
    "pipeline", "plain bytes", "pretrained model", "shards", "sources", "stream", "tags", "teacher",
    "tensor parallelism", "test split", "text augmentation", "text filters", "token batches", "tokenizer",
]  # fmt: skip
Features: TypeAlias = frozenset[Feature]
FEATURES: Features = frozenset(get_args(Feature))

# What several tasks share.
PREPARED: Features = frozenset({"shards", "sources", "stream", "groups", "test split", "label column", "curriculum"})
"""What ``ServedTask.prepare`` gives."""
MODEL: Features = frozenset({"pretrained model", "tensor parallelism", "pipeline"})
NAMED: Features = frozenset({"named labels"})
CLASSES: Features = NAMED | {
    *("label smoothing", "class weights", "balanced sampling", "curriculum by loss", "teacher", "cascade"),
}
TOKENS: Features = frozenset({"buckets", "tokenizer", "text filters"})
TEXTS: Features = TOKENS | {
    *("input column", "token batches", "near duplicates", "text augmentation", "curriculum by column"),
    "linear baseline",
}
IMAGES: Features = frozenset({"input column", "image", "image augmentation", "linear baseline"})
ROWS: Features = frozenset({"features", "kinds of columns"})
RECORDS: Features = frozenset({"fields", "kinds of columns", "buckets", "tokenizer", "image", "audio"})
READ: Features = RECORDS | ROWS | NAMED | {"input column", "label separator", "audio augmentation"}
"""For tasks of one's own: processor and targets may read any key, and their inputs say what can be masked."""

_KEYS: dict[Feature, str] = {
    "shards": "data.shards", "stream": "data.stream", "sources": "data.sources", "groups": "data.group_column",
    "test split": "data.test_fraction data.test_source", "label noise": "data.clean.label_noise",
    "text filters": "data.clean.min_length data.clean.max_length data.clean.max_symbol_share data.clean.languages",
    "near duplicates": "data.clean.near_duplicates", "input column": "data.columns.input",
    "label column": "data.columns.label", "label separator": "data.columns.separator",
    "named labels": "data.stream.labels",
    "features": "data.columns.features", "kinds of columns": "data.columns.categories data.columns.numbers",
    "fields": "data.columns.fields", "pairs": "data.columns.anchor data.columns.positive train.temperature",
    "tags": "data.columns.tokens data.columns.tags data.columns.tag_names data.columns.spans",
    "tokenizer": "data.tokenizer.vocab_size data.tokenizer.max_piece_length", "plain bytes": "data.tokenizer.kind",
    "image": "data.image", "audio": "data.audio", "buckets": "data.buckets", "blocks": "data.block_length",
    "conversations": "data.chat.packing data.chat.template", "balanced sampling": "data.sampling",
    "pretrained model": "model.pretrained", "token batches": "train.tokens_per_batch",
    "label smoothing": "train.label_smoothing", "class weights": "train.class_weights", "teacher": "train.teacher",
    "curriculum": "train.curriculum", "curriculum by column": "train.curriculum.column",
    "curriculum by loss": "train.curriculum.model", "text augmentation": "train.augment.text",
    "image augmentation": "train.augment.image", "audio augmentation": "train.augment.audio",
    "mixup": "train.augment.mix", "linear baseline": "train.linear_baseline", "cascade": "serve.cascade",
    "tensor parallelism": "train.plan.tensor", "pipeline": "train.plan.pipeline",
}  # fmt: skip
"""The keys that a recipe may set only if its task supports a feature."""


def require_supported(recipe: Recipe, supports: Set[Feature]) -> None:
    """Raise RecipeError if the recipe sets a key that its task does not support."""
    lacking = {feature: keys.split() for feature, keys in _KEYS.items() if feature not in supports}
    for feature, key in ((feature, key) for feature, keys in lacking.items() for key in _of_all_sources(recipe, keys)):
        if recipe.is_set(key):
            able = [name for name, task in BUILT_IN_TASKS.items() if feature in import_attribute(task).supports]
            others = f" (these do: {', '.join(able)})" if able else ""
            own = f", or add {feature!r} to the task's supports" if ":" in recipe.task else ""
            value = recipe.value_of(key)
            given = "set" if isinstance(value, Section) else repr(value)
            raise RecipeError(
                f"{key} is {given}, which task {recipe.task} does not support{others}: leave it out{own}"
            ).of("task.unsupported", key)


def _of_all_sources(recipe: Recipe, keys: Sequence[str]) -> Iterator[str]:
    """Yield keys, and those of the columns also for each of ``data.sources``."""
    for key in keys:
        yield key
        if key.startswith("data.columns."):
            for place in range(len(recipe.data.sources)):
                yield key.replace("data.", f"data.sources.{place}.", 1)
