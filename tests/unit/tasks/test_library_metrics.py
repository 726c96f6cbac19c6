"""Metrics of torchmetrics and scikit-learn: exact over batches and ranks, the same in a compilation, or refused."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from sklearn import metrics
from torchmetrics import classification, regression

from app.compile.reference import Judge, Tally
from app.config import load_recipe
from app.data.prepared import IGNORED, Batch
from app.data.targets import Classes, LabelSets, Numbers, Scale
from app.runs import Run
from app.tasks import Metric, SklearnMetric, TorchMetric, find_task, prepare
from app.tasks.classification import ImageClassification
from app.tasks.language import LanguageModeling
from app.tasks.objective import CrossEntropy, Objective, objective_of
from app.tensors import OUTPUT
from app.training.run import prepare_run
from tests.helpers import ROOT
from tests.wording import refused

CLASSES = Classes(["a", "b", "c"])
F1 = TorchMetric("f1", lambda targets: classification.MulticlassF1Score(targets.num_outputs))


def first_column(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return outputs[:, 0], targets


def of_labels(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return outputs.sigmoid(), targets.int()


def of_classes(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return outputs.softmax(-1), targets


@pytest.mark.parametrize(
    ("metric", "given", "columns", "targets"),
    [
        (F1, CLASSES, 3, torch.randint(3, (501,))),
        (
            TorchMetric("auroc", lambda _: classification.MulticlassAUROC(3, thresholds=20), inputs=of_classes),
            CLASSES,
            3,
            torch.randint(3, (501,)),
        ),
        (
            TorchMetric("f1", lambda targets: classification.MultilabelF1Score(targets.num_outputs), inputs=of_labels),
            LabelSets(["a", "b"]),
            2,
            torch.randint(2, (501, 2)).float(),
        ),
        (
            TorchMetric("r2", lambda _: regression.R2Score(), inputs=first_column),
            Numbers(Scale()),
            1,
            torch.randn(501),
        ),
    ],
)
def test_parts_of_any_size_add_up_to_what_torchmetrics_says_of_the_whole(
    metric: TorchMetric, given: Any, columns: int, targets: torch.Tensor
) -> None:
    outputs = torch.randn(len(targets), columns)
    bound = metric.bind(given)
    parts = [slice(0, 200), slice(200, 200), slice(200, 201), slice(201, None)]
    sums = torch.stack([bound.sums(outputs[part], targets[part]) for part in parts]).sum(0)
    whole = metric.make(given)
    whole.update(*(metric.inputs(outputs, targets) if metric.inputs else (outputs, targets)))
    assert sums.shape == (bound.size,)
    assert bound.value(sums) == pytest.approx(whole.compute().item(), abs=1e-5)  # torchmetrics adds in float32
    assert math.isnan(bound.value(bound.sums(outputs[:0], targets[:0])))


BY_CLASS = SklearnMetric("f1", partial(metrics.f1_score, average="macro"), inputs=lambda o, t: (o.argmax(-1), t))


@pytest.mark.parametrize("metric", [F1, BY_CLASS], ids=["torchmetrics", "sklearn"])
def test_compile_judges_by_the_number_that_a_validation_measures(metric: Metric) -> None:
    outputs, targets = torch.randn(40, 3), torch.randint(3, (40,))
    targets[5:9] = IGNORED
    bound = metric.bind(CLASSES)
    objective = Objective(CrossEntropy(), (bound,))
    parts = [(outputs[part], targets[part]) for part in (slice(7), slice(1), slice(7, 40))]
    parts[1] = (outputs[:1], torch.full((1,), IGNORED))  # a rank without samples
    validated = objective.values(*objective.total(parts, torch.device("cpu")))
    counted = targets != IGNORED
    expected = metrics.f1_score(targets[counted], outputs.argmax(-1)[counted], average="macro")
    assert validated["val_f1"] == pytest.approx(expected, abs=1e-6)
    tally = Tally(Judge(bound))
    for part in (slice(0, 30), slice(30, 40)):
        tally.add({OUTPUT: outputs[part].numpy()}, Batch({"x": np.zeros(0)}, targets[part].numpy()))
    assert tally.score is not None
    assert tally.score.value == validated["val_f1"] > 0
    assert (tally.score.metric, tally.score.mode) == ("f1", "max")


@pytest.mark.parametrize(
    "make",
    [
        lambda _: classification.MulticlassAUROC(3),
        lambda _: regression.PearsonCorrCoef(),
        lambda _: torchmetrics.MaxMetric(),
        lambda _: regression.MeanAbsoluteError() + 1.0,
        lambda _: torchmetrics.MetricCollection([regression.R2Score()]),
        lambda _: classification.MulticlassF1Score(3, average=None),
        lambda _: regression.MeanAbsoluteError(),
    ],
)
def test_a_metric_that_does_not_add_up_is_refused(make: Callable[[Any], Any]) -> None:
    with refused("metric.no_sums"):
        TorchMetric("own", make).bind(CLASSES)


def test_each_token_that_counts_is_a_row() -> None:
    outputs, targets = torch.randn(4, 6, 3), torch.randint(3, (4, 6))
    targets[:, 3:] = IGNORED
    targets[1] = IGNORED
    objective = Objective(CrossEntropy(), (BY_CLASS,))
    longer = (torch.cat([outputs, outputs], 1), torch.cat([targets, targets], 1))
    values = objective.values(*objective.total([(outputs, targets), longer], torch.device("cpu")))
    found, expected = outputs[targets != IGNORED].argmax(-1), targets[targets != IGNORED]
    assert values["val_f1"] == pytest.approx(metrics.f1_score(expected, found, average="macro"))


def test_without_a_row_there_is_no_value() -> None:
    objective = Objective(CrossEntropy(), (BY_CLASS,))
    nothing = (torch.randn(2, 3), torch.full((2,), IGNORED))
    assert math.isnan(objective.values(*objective.total([nothing], torch.device("cpu")))["val_f1"])


class ByLogits(ImageClassification):
    metrics = (SklearnMetric("balanced", metrics.balanced_accuracy_score),)


class ByEachClass(ImageClassification):
    metrics = (SklearnMetric("f1", partial(metrics.f1_score, average=None), inputs=BY_CLASS.inputs),)


class ByExactAuroc(ImageClassification):
    metrics = (TorchMetric("auroc", lambda targets: classification.MulticlassAUROC(targets.num_outputs)),)


class WithoutTargets(LanguageModeling):
    metrics = (F1,)


@pytest.mark.parametrize(
    ("task", "rule"),
    [("ByExactAuroc", "metric.no_sums"), ("ByLogits", "metric.fails"), ("ByEachClass", "metric.fails")],
)
def test_a_run_refuses_it_before_a_worker_starts(task: str, rule: str) -> None:
    keys = [f"task={__name__}:{task}", "train.early_stopping={metric: val_loss, mode: min}", "tune=null"]
    with refused(rule):
        prepare_run(Run.start("train", load_recipe(ROOT / "recipes/digits.yaml", keys)))


def test_a_pipeline_refuses_a_metric_of_all_rows() -> None:
    keys = [f"task={__name__}:ByLogits", "train.early_stopping={metric: val_loss, mode: min}", "tune=null"]
    recipe = load_recipe(ROOT / "recipes/digits.yaml", [*keys, "train.plan={pipeline: 2}"])
    with refused("pipeline.metric", "train.plan.pipeline"):
        objective_of(find_task(recipe.task), recipe.train, prepare(recipe))


def test_a_task_without_targets_refuses_it() -> None:
    with refused("task.metrics"):
        find_task(f"{__name__}:WithoutTargets")
