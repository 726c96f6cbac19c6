"""Tasks that are refused before they cost anything: unknown, incomplete, or with keys of other tasks."""

import pytest
import torch
from upath import UPath

from app.config import BUILT_IN_TASKS, Recipe, load_recipe
from app.data.labelled import LabelledData
from app.data.prepared import PreparedData
from app.data.targets import Classes
from app.data.text import TextProcessor
from app.tasks import Metric, ServedTask, Task, find_compiled_task, find_served_task, find_task, prepare, sum_and_count
from app.tasks.classification import TextClassification
from app.tasks.metrics import Accuracy
from tests.helpers import ROOT
from tests.wording import refused

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
    ("name", "rule"),
    [
        ("WithoutMetric", "task.incomplete"),
        ("WithoutLoss", "task.incomplete"),
        ("WithoutFacts", "task.incomplete"),
        ("WithItsOwnFacts", "task.facts"),
        ("WithoutData", "task.incomplete"),
        ("DIGITS", "task.not_a_task"),
    ],
)
def test_a_class_that_lacks_a_part_is_refused_with_its_name(name: str, rule: str) -> None:
    with refused(rule):
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
    ("name", "rule"),
    [
        ("Judged", "task.metrics"),
        ("JudgedByLoss", "task.metrics"),
        ("JudgedTwice", "task.metrics"),
        ("WithArguments", "task.not_created"),
    ],
)
def test_a_task_that_would_fail_after_training_is_refused(name: str, rule: str) -> None:
    with refused(rule):
        find_task(f"{__name__}:{name}")


def test_a_language_model_answers_no_rows_and_a_processor_makes_a_classification() -> None:
    assert find_compiled_task("language-modeling").served_as == "tokens"
    assert find_compiled_task("text-classification").served_as == "rows"
    with refused("task.not_served"):
        find_served_task("language-modeling")
    assert find_served_task("app.data.text:TextProcessor").targets is Classes


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["train.early_stopping={metric: val_f1, mode: max}"], "train.early_stopping.metric"),
        (["tune={space: a:b, metric: val_own, mode: max}"], "tune.metric"),
    ],
)
def test_a_metric_that_the_task_has_not_is_refused_before_data_are_read(overrides: list[str], key: str) -> None:
    with refused("metric.unknown", key):
        prepare(load_recipe(DIGITS, [*overrides, "data.source=/nowhere"]))


@pytest.mark.parametrize("key", ["train.class_weights=balanced", "data.sampling=balanced", "train.label_smoothing=0.1"])
def test_keys_for_classes_are_refused_where_rows_have_numbers(key: str) -> None:
    with refused("task.unsupported", key.partition("=")[0]):
        prepare(load_recipe(str(ROOT / "recipes/diabetes.yaml"), [key]))


def test_a_task_that_is_unknown_is_answered_with_the_names_of_all_built_in_ones() -> None:
    with refused("recipe.string_pattern_mismatch", "task") as error:
        load_recipe(DIGITS, ["task=image-clasification"])
    expected = str(error.value).split(": expected ")[1]
    assert set(expected.split(", ")[: len(BUILT_IN_TASKS)]) == set(BUILT_IN_TASKS)
