"""Metrics of torchmetrics: they add up over batches and ranks, judge a compilation, and are refused if they cannot."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torchmetrics import classification, regression

from app.compile.reference import Judge, Tally
from app.config import load_recipe
from app.data.prepared import IGNORED, Batch
from app.data.targets import Classes, LabelSets, Numbers, Scale
from app.errors import RecipeError
from app.runs import Run
from app.tasks import TorchMetric, find_task
from app.tasks.classification import ImageClassification
from app.tasks.language import LanguageModeling
from app.tasks.objective import CrossEntropy, Objective
from app.tensors import OUTPUT
from app.training.run import prepare_run
from tests.helpers import ROOT

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


def test_compile_judges_by_the_number_that_a_validation_measures() -> None:
    outputs, targets = torch.randn(40, 3), torch.randint(3, (40,))
    targets[5:9] = IGNORED
    bound = F1.bind(CLASSES)
    objective = Objective(CrossEntropy(), (bound,))
    validated = objective.values(objective.sums(outputs[:7], targets[:7]) + objective.sums(outputs[7:], targets[7:]))
    tally = Tally(Judge(bound))
    for part in (slice(0, 30), slice(30, 40)):
        tally.add({OUTPUT: outputs[part].numpy()}, Batch({"x": np.zeros(0)}, targets[part].numpy()))
    assert tally.score is not None
    assert tally.score.value == validated["val_f1"] > 0
    assert (tally.score.metric, tally.score.mode) == ("f1", "max")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: classification.MulticlassAUROC(3), "MulticlassAUROC, whose state preds is not a sum"),
        (
            lambda _: regression.PearsonCorrCoef(),
            r"state mean_x is not a sum, .* such as a binned one \(thresholds=100\)",
        ),
        (lambda _: torchmetrics.MaxMetric(), "state max_value is not a sum"),
        (
            lambda _: regression.MeanAbsoluteError() + 1.0,
            "CompositionalMetric, which is not a single metric of torchmetrics",
        ),
        (
            lambda _: torchmetrics.MetricCollection([regression.R2Score()]),
            "MetricCollection, which is not a single metric",
        ),
        (lambda _: classification.MulticlassF1Score(3, average=None), "value is not one number: .*average='macro'"),
        (lambda _: regression.MeanAbsoluteError(), "whose better direction is not max: set mode to min"),
    ],
)
def test_a_metric_that_does_not_add_up_is_refused(make: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(RecipeError, match=f"the metric own of the task is .*{words}"):
        TorchMetric("own", make).bind(CLASSES)


class ByExactAuroc(ImageClassification):
    metrics = (TorchMetric("auroc", lambda targets: classification.MulticlassAUROC(targets.num_outputs)),)


class WithoutTargets(LanguageModeling):
    metrics = (F1,)


def test_a_run_refuses_it_before_a_worker_starts() -> None:
    keys = [f"task={__name__}:ByExactAuroc", "train.early_stopping={metric: val_auroc, mode: max}", "tune=null"]
    with pytest.raises(RecipeError, match="the metric auroc of the task is MulticlassAUROC"):
        prepare_run(Run.start("train", load_recipe(ROOT / "recipes/digits.yaml", keys)))
    with pytest.raises(RecipeError, match="a TorchMetric needs targets, which only a ServedTask has"):
        find_task(f"{__name__}:WithoutTargets")
