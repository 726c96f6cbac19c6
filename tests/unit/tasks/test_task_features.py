"""Which keys each built-in task refuses when a recipe is loaded, and what a person's own task says."""

from typing import Any

import pytest

from app.config import BUILT_IN_TASKS, load_recipe
from app.config.loading import parse_recipe
from app.config.overrides import apply_overrides
from app.data.text import TextProcessor
from app.errors import RecipeError
from app.tasks import Task, find_task, prepare
from app.tasks.classification import Classification, TextClassification
from app.tasks.metrics import Accuracy
from tests.helpers import ROOT
from tests.wording import refused

FIELDS = "{a: {kind: text}}"
STREAM = "{source: nats://h:1/S, stream: %s}"
SOURCES = "{source: null, sources: [{source: a}, {source: b, columns: %s}]}"
CONSTANT = "train.schedule={name: constant, warmup_fraction: 0.0}"

# The columns are the tasks in the order of ``BUILT_IN_TASKS``: classification of texts, images and rows; regression of
# texts and rows; sets of labels of texts and rows; the three of records; embedding, tagging, language modelling, chat.
TABLE = [
    # key                          c c c  r r  m m  * * *  e t l ch
    ("data.shards={size: 64MB}", "x x x  x x  x x  x x x  x x x x"),
    (f"data={STREAM % '{}'}", "x x x  x x  x x  x x x  x x x x", CONSTANT),
    (f"data={STREAM % '{labels: [a, b]}'}", "x x x  . .  x x  x . x  . x . .", CONSTANT),
    ("data={source: null, sources: [{source: a}, {source: b}]}", "x x x  x x  x x  . . .  . x x x"),
    (f"data={SOURCES % '{input: a}'}", "x x .  x .  x .  . . .  . x x ."),
    (f"data={SOURCES % '{label: a}'}", "x x x  x x  x x  . . .  . . . ."),
    (f"data={SOURCES % '{features: [a]}'}", ". . x  . x  . x  . . .  . . . ."),
    ("data.group_column=user", "x x x  x x  x x  x x x  . x x x"),
    ("data.test_fraction=0.1", "x x x  x x  x x  x x x  x x x x"),
    ("data.test_source=b.csv", "x x x  x x  x x  x x x  x x x x"),
    ("data.clean.min_length=3", "x . .  x .  x .  . . .  x x x ."),
    ("data.clean.near_duplicates=0.8", "x . .  x .  x .  . . .  x x x ."),
    ("data.clean.label_noise=report", "x . .  . .  . .  . . .  . . . ."),
    ("data.columns.input=a", "x x .  x .  x .  . . .  . x x ."),
    ("data.columns.label=b", "x x x  x x  x x  x x x  . . . ."),
    ("data.columns.separator=;", ". . .  . .  x x  . . x  . . . ."),
    ("data.columns.features=[a]", ". . x  . x  . x  . . .  . . . ."),
    ("data.columns.numbers=[a]", ". . x  . x  . x  x x x  . . . ."),
    (f"data.columns.fields={FIELDS}", ". . .  . .  . .  x x x  . . . ."),
    ("data.columns.anchor=a", ". . .  . .  . .  . . .  x . . ."),
    ("data.columns.spans=a", ". . .  . .  . .  . . .  . x . ."),
    ("data.tokenizer.vocab_size=500", "x . .  x .  x .  x x x  x x x ."),
    ("data.tokenizer.kind=bytes", ". . .  . .  . .  . . .  . . x ."),
    ("data.buckets=[8]", "x . .  x .  x .  x x x  x x . ."),
    ("data.image.size=8", ". x .  . .  . .  x x x  . . . ."),
    ("data.audio.bins=8", ". . .  . .  . .  x x x  . . . ."),
    ("data.block_length=64", ". . .  . .  . .  . . .  . . x x"),
    ("data.chat.packing=false", ". . .  . .  . .  . . .  . . . x"),
    ("data.sampling=balanced", "x x x  . .  . .  x . .  . . . ."),
    ("model.pretrained=folder", "x x x  x x  x x  . . .  x x x x"),
    ("train.tokens_per_batch=4096", "x . .  x .  x .  . . .  . x x x", "train.global_batch_size=null"),
    ("train.label_smoothing=0.1", "x x x  . .  . .  x . .  . x x x"),
    ("train.class_weights=balanced", "x x x  . .  . .  x . .  . . . ."),
    ("train.temperature=0.1", ". . .  . .  . .  . . .  x . . ."),
    ("train.teacher={model: big}", "x x x  . .  . .  x . .  . . . ."),
    ("train.curriculum={by: length}", "x x x  x x  x x  x x x  x x . x"),
    ("train.curriculum={by: column, column: a}", "x . .  x .  x .  . . .  . . . ."),
    ("train.curriculum={by: loss, model: big}", "x x x  . .  . .  x . .  . . . ."),
    ("train.augment={text: {drop: 0.1}}", "x . .  x .  x .  . . .  . . . ."),
    ("train.augment={image: {flip: 0.5}}", ". x .  . .  . .  . . .  . . . ."),
    ("train.augment={audio: {masks: 1}}", ". x .  . .  . .  . . .  . . . ."),
    ("train.augment={mix: {mixup: 0.2}}", ". x x  . .  . .  . . .  . . . ."),
    ("train.linear_baseline=true", "x x x  x x  x x  . . .  . . . ."),
    ("train.plan={tensor: 2}", "x x x  x x  x x  x x x  . x x x", "train.workers=2"),
    ("train.plan={pipeline: 2}", "x x x  x x  x x  x x x  . x x x", "train.workers=2"),
    ("serve.cascade={before: [small]}", "x x x  . .  . .  x . .  . . . ."),
]


def refusal_of(task: str, *overrides: str) -> str | None:
    """Return why a recipe of the task is refused; None if it is not."""
    tree: dict[str, Any] = {"name": "own", "task": task, "data": {"source": "a.csv"}, "model": {"factory": "own:net"}}
    needed = [f"data.columns.fields={FIELDS}"] if task.startswith("multimodal-") else []
    needed += ["model.pretrained=folder"] if task == "chat" else []
    whole = [override for override in overrides if override.startswith("data={")]
    try:
        parse_recipe(apply_overrides(tree, [*whole, *needed, *(one for one in overrides if one not in whole)]))
    except RecipeError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("override", "row", "more"), [(key, row, more) for key, row, *more in TABLE])
def test_a_task_refuses_the_keys_that_it_does_not_support_and_no_others(
    override: str, row: str, more: list[str]
) -> None:
    supported = dict(zip(BUILT_IN_TASKS, row.split(), strict=True))
    found = {task: refusal_of(task, override, *more) for task in supported}
    assert {task: "." if why and "does not support" in why else "x" for task, why in found.items()} == supported
    assert not [why for task, why in found.items() if why and supported[task] == "x"]


def test_a_refusal_names_the_key_its_value_the_tasks_that_support_it_and_the_way_out() -> None:
    assert refusal_of("chat", "data.columns.separator=;") == (
        "recipe: data.columns.separator is ';', which task chat does not support (these do: text-multilabel, "
        "tabular-multilabel, multimodal-multilabel): leave it out"
    )


class Filtered(Classification):
    processor = TextProcessor
    supports = Classification.supports | {"text filters"}


class Unfiltered(Classification):
    processor = TextProcessor


class Misspelt(Classification):
    processor = TextProcessor
    supports = frozenset({"shrads"})  # type: ignore[arg-type]


class Unsaid(TextClassification):
    def prepare(self, *_: Any) -> Any:
        raise NotImplementedError


class Streamed(Task):
    metrics, learns_classes, supports = (Accuracy(),), True, frozenset({"stream"})

    def prepare(self, *_: Any) -> Any:
        raise NotImplementedError

    def load(self, *_: Any) -> Any:
        raise NotImplementedError


def test_a_task_of_ones_own_says_what_it_supports() -> None:
    keys = ["data.source=/nowhere.csv", "data.clean.min_length=3", "train.linear_baseline=false", "tune=null"]
    recipe = load_recipe(ROOT / "recipes/reviews.yaml", [*keys, f"task={__name__}:Unfiltered"])
    with refused("task.unsupported", "data.clean.min_length"):
        prepare(recipe)
    find_task(f"{__name__}:Filtered").require(recipe.model_copy(update={"task": f"{__name__}:Filtered"}))


@pytest.mark.parametrize(
    ("name", "rule"), [("Misspelt", "task.no_feature"), ("Unsaid", "task.incomplete"), ("Streamed", "task.incomplete")]
)
def test_supports_that_cannot_hold_are_refused(name: str, rule: str) -> None:
    with refused(rule):
        find_task(f"{__name__}:{name}")
