"""Tasks that are refused before they cost anything: unknown, incomplete, or with keys of other tasks."""

from pathlib import Path

import pytest
import torch
from upath import UPath

from app.config import BUILT_IN_TASKS, Recipe, load_recipe
from app.data.labelled import LabelledData
from app.data.prepared import PreparedData
from app.data.targets import Classes
from app.data.text import TextProcessor
from app.errors import RecipeError
from app.tasks import Metric, ServedTask, Task, find_served_task, find_task, prepare, sum_and_count
from app.tasks.classification import TextClassification
from app.tasks.metrics import Accuracy
from tests.helpers import ROOT

DIGITS = str(ROOT / "recipes/digits.yaml")


class WithoutMetric(ServedTask):
    processor, targets = TextProcessor, Classes

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs[:, 0] - targets).abs()


class WithoutLoss(ServedTask):
    processor, metrics = TextProcessor, (Accuracy(),)


class BareTargets:
    rule = Classes.rule


class WithoutFacts(TextClassification):
    targets = BareTargets  # type: ignore[assignment]


class WithItsOwnFacts(TextClassification):
    def facts(self, data: LabelledData) -> dict[str, int]:
        return {"num_labels": len(data.labels)}


class WithoutData(Task):
    metrics = (Accuracy(),)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs[:, 0] - targets).abs()

    def load(self, recipe: Recipe, folder: UPath) -> PreparedData:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("WithoutMetric", "has no metrics: add it to the class WithoutMetric"),
        ("WithoutLoss", "has no loss, no targets: add it"),
        ("WithoutFacts", "has no targets.facts: add it"),
        ("WithItsOwnFacts", "the class WithItsOwnFacts has facts, which are not read there: move them"),
        ("WithoutData", "has no prepare: add it"),
        ("DIGITS", "names str: expected a subclass of app.tasks.Task, or a processor"),
    ],
)
def test_a_class_that_lacks_a_part_is_refused_with_its_name(name: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        find_task(f"{__name__}:{name}")


class Nameless(Metric):
    def sums(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return sum_and_count(outputs[:, 0])


class OfLoss(Nameless):
    name = "loss"


class Judged(TextClassification):
    metrics = (Nameless(),)


class JudgedByLoss(Judged):
    metrics = (OfLoss(),)


class JudgedTwice(Judged):
    metrics = (Accuracy(), Accuracy())


class WithArguments(Judged):
    metrics = (Accuracy(),)

    def __init__(self, size: int) -> None:
        self.size = size


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Judged", "the metric Nameless has no name: give"),
        ("JudgedByLoss", "a metric is called loss, but val_loss is the loss itself"),
        ("JudgedTwice", "two metrics are called accuracy: choose another name"),
        ("WithArguments", r"WithArguments\(\) fails .*'size'.*: let the class be created without arguments"),
    ],
)
def test_a_task_that_would_fail_after_training_is_refused(name: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        find_task(f"{__name__}:{name}")


def test_a_language_model_is_not_compiled_and_a_processor_makes_a_classification() -> None:
    with pytest.raises(RecipeError, match="language-modeling cannot be compiled or served: expected text-class"):
        find_served_task("language-modeling")
    assert find_served_task("app.data.text:TextProcessor").targets is Classes


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.early_stopping={metric: val_f1, mode: max}"], "early_stopping.metric is val_f1, and task image-class"),
        (["tune={space: a:b, metric: val_own, mode: max}"], "tune.metric is val_own, .* has val_loss, val_accuracy"),
    ],
)
def test_a_metric_that_the_task_has_not_is_refused_before_data_are_read(overrides: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        prepare(load_recipe(DIGITS, [*overrides, "data.source=/nowhere"]))


def test_a_linear_baseline_is_refused_before_training_where_rows_have_several_labels(tmp_path: Path) -> None:
    rows = "".join(f"text {number},{'a|b' if number % 2 else 'b'}\n" for number in range(80))
    (tmp_path / "rows.csv").write_text(f"input,label\n{rows}", encoding="utf-8")
    keys = [f"data.source={tmp_path / 'rows.csv'}", "task=text-multilabel", "train.linear_baseline=true"]
    keys += ["train.label_smoothing=0.0", "train.early_stopping=null", "tune=null", "train.global_batch_size=8"]
    keys += ["data.columns={input: input, label: label}"]
    with pytest.raises(
        RecipeError, match=r"train\.linear_baseline is True, which task text-multilabel does not support"
    ):
        load_recipe(str(ROOT / "recipes/reviews.yaml"), keys)


@pytest.mark.parametrize("key", ["train.class_weights=balanced", "data.sampling=balanced", "train.label_smoothing=0.1"])
def test_keys_for_classes_are_refused_where_rows_have_numbers(key: str) -> None:
    with pytest.raises(RecipeError, match=f"{key.partition('=')[0]} is .*, which task tabular-regression does not"):
        prepare(load_recipe(str(ROOT / "recipes/diabetes.yaml"), [key]))


def test_a_task_that_is_unknown_is_answered_with_the_names_of_all_built_in_ones() -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(DIGITS, ["task=image-clasification"])
    expected = str(refused.value).split(": expected ")[1]
    assert set(expected.split(", ")[: len(BUILT_IN_TASKS)]) == set(BUILT_IN_TASKS)
