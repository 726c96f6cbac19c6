"""Tasks: totals of a validation, answers, and files of older versions."""

import math
import re
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from app.config import BUILT_IN_TASKS, PlanConfig, TrainConfig, load_recipe
from app.config.layout import lay_out
from app.config.metrics import MODES, Selection
from app.data.labelled import LabelledData
from app.data.prepared import IGNORED
from app.data.targets import Classes
from app.published.loaded import check_answers
from app.repository.manifest import ModelCard
from app.tasks import Metric, find_served_task, find_task, prepare, sum_and_count
from app.tasks.classification import TextClassification
from app.tasks.language import Perplexity
from app.tasks.metrics import Accuracy
from app.tasks.objective import CrossEntropy, Objective, RowLoss, class_weights
from app.training.engine.engine import sums_to_add
from app.training.records import EpochRecord, best_of, should_stop
from tests.helpers import ROOT
from tests.orders import batches_of, in_memory
from tests.publishing import CARD
from tests.wording import refused

DIGITS = str(ROOT / "recipes/digits.yaml")


@pytest.mark.parametrize("name", ["text-classification", "text-regression", "language-modeling"])
def test_without_a_row_that_counts_every_number_is_nan(name: str) -> None:
    task = find_task(name)
    objective = Objective(CrossEntropy() if task.learns_classes else RowLoss(task.loss), tuple(task.metrics))
    values = objective.values(torch.zeros(objective.num_sums, dtype=torch.float64))
    assert all(map(math.isnan, values.values())), values


def test_the_recipe_knows_the_modes_of_built_in_metrics() -> None:
    modes = {f"val_{metric.name}": metric.mode for name in BUILT_IN_TASKS for metric in find_task(name).metrics}
    assert modes == {name: MODES[name] for name in modes}


def absolute_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs[:, 0] - targets).abs()


class Largest(Metric):
    """Share of rows over 1; an own metric."""

    name = "over_one"

    def sums(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return sum_and_count(outputs[:, 0] > 1)


@pytest.mark.parametrize(
    ("objective", "outputs", "targets"),
    [
        (Objective(CrossEntropy(), (Accuracy(), Perplexity())), torch.randn(7, 3), torch.randint(3, (7,))),
        (Objective(CrossEntropy(), (Perplexity(), Accuracy())), torch.randn(7, 4, 3), torch.randint(3, (7, 4))),
        (Objective(RowLoss(absolute_error), (Largest(),)), torch.randn(7, 1), torch.randn(7)),
    ],
)
def test_uneven_parts_and_an_empty_one_add_up_to_the_whole(
    objective: Objective, outputs: torch.Tensor, targets: torch.Tensor
) -> None:
    parts = [slice(0, 2), slice(2, 7)]
    sums: Any = sum(objective.sums(outputs[part], targets[part]) for part in parts)
    nothing = torch.full_like(targets[:1], float("nan") if targets.is_floating_point() else IGNORED)
    sums = sums + objective.sums(outputs[:1], nothing)
    assert sums.shape == (objective.num_sums,)
    assert objective.values(sums) == pytest.approx(objective.values(objective.sums(outputs, targets)))
    assert objective.values(sums)["val_loss"] == pytest.approx(objective.mean(outputs, targets).item())


def test_the_perplexity_that_compile_measures_is_that_of_a_validation() -> None:
    outputs, targets = torch.randn(7, 4, 3), torch.randint(3, (7, 4))
    objective = Objective(CrossEntropy(label_smoothing=0.1), (Perplexity(),))
    validated = objective.values(objective.sums(outputs, targets))
    alone = Perplexity().value(Perplexity().sums(outputs, targets))
    assert alone == validated["val_perplexity"] == pytest.approx(math.exp(validated["val_loss"]))


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (CrossEntropy(label_smoothing=0.1), torch.randn(6, 3), torch.tensor([0, IGNORED, IGNORED, 2, 1, 1])),
        (CrossEntropy(), torch.randn(2, 3, 4), torch.tensor([[1, 2, IGNORED], [IGNORED] * 3])),
        (RowLoss(absolute_error), torch.randn(6, 1), torch.tensor([0.5, math.nan, math.nan, 1.0, 2.0, math.nan])),
    ],
)
def test_rows_that_do_not_count_make_no_difference_to_how_a_step_is_shared_out(
    loss: CrossEntropy | RowLoss, outputs: torch.Tensor, targets: torch.Tensor
) -> None:
    objective, rows = Objective(loss), len(targets)

    def step(*sizes: int) -> list[float]:
        """Return the loss of a step in such parts, then its gradient, as an engine adds them up."""
        given = outputs.clone().requires_grad_()
        total = torch.zeros(())
        for part, own in zip(given.split(sizes), targets.split(sizes), strict=True):  # type: ignore[no-untyped-call]
            total = total + objective.mean(part, own) * (len(own) / rows * objective.counted_share(own))
        total.backward()  # type: ignore[no-untyped-call]
        assert given.grad is not None
        return [total.item(), *given.grad.flatten().tolist()]

    whole = step(rows)
    assert whole[0] > 0
    for first in range(1, rows):
        assert step(first, rows - first) == pytest.approx(whole, abs=1e-6)
    assert step(*[1] * rows) == pytest.approx(whole, abs=1e-6), "some parts have no target that counts"


def test_targets_that_all_count_leave_a_mean_to_the_bit() -> None:
    outputs, targets = torch.randn(7, 5, 3), torch.randint(3, (7, 5))
    objective = Objective(CrossEntropy(label_smoothing=0.1))
    plain = torch.nn.functional.cross_entropy(outputs.reshape(-1, 3), targets.reshape(-1), label_smoothing=0.1)
    share = 7 * 3 / 20
    assert torch.equal(objective.mean(outputs, targets) * (share * objective.counted_share(targets)), plain * share)


class LogLikelihood(Metric):
    """A metric that may be negative."""

    name, mode = "nll", "min"

    def sums(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return sum_and_count(-outputs[:, 0])


@pytest.mark.parametrize(
    ("before", "after", "drop"),
    [(-2.0, -1.5, 0.25), (-2.0, -2.5, -0.25), (2.0, 2.5, 0.25), (0.0, 0.1, math.inf), (0.0, -0.1, -math.inf)],
)
def test_a_rise_of_an_error_is_worse_whatever_its_sign(before: float, after: float, drop: float) -> None:
    assert LogLikelihood().drop(before, after) == pytest.approx(drop)


def test_a_validation_holds_the_float32_logits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []
    real = CrossEntropy.sums
    monkeypatch.setattr(CrossEntropy, "sums", lambda self, *args: given.append(args[0]) or real(self, *args))
    monkeypatch.setattr(Accuracy, "sums", lambda _, *args: given.append(args[0]) or torch.zeros(2))
    outputs, targets = torch.randn(2, 5, 3).bfloat16(), torch.randint(3, (2, 5))
    Objective(CrossEntropy(), (Accuracy(),)).sums(outputs, targets)
    assert [logits.dtype for logits in given] == [torch.float32] * 2
    assert given[0].data_ptr() == given[1].data_ptr()


def test_tensor_parallel_ranks_add_to_a_validation_once() -> None:
    layout = lay_out(PlanConfig(tensor=2, micro_batch=2), global_batch_size=8, workers=4)
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    given = [sums_to_add(parts[layout.data_rank(rank)], layout, rank) for rank in range(4)]
    assert torch.stack(given).sum(0).tolist() == [4.0, 6.0]


def test_a_version_keeps_its_score() -> None:
    card = ModelCard.model_validate_json(CARD.model_dump_json())
    assert (card.accuracy, card.score_in_words) == (0.9, "accuracy 0.9000 on the validation split")
    assert card == CARD


@pytest.mark.parametrize(
    "answers",
    [
        lambda outputs: [{"label": 3}] * len(outputs),
        lambda outputs: [{"top": np.float32(row[0])} for row in outputs],
        lambda outputs: [{"top": row[9]} for row in outputs.tolist()],
        lambda _: [{"top": 1}],
    ],
)
def test_answers_that_no_request_would_get_are_refused_with_the_task(answers: Any) -> None:
    task: Any = type("Own", (TextClassification,), {"answer": lambda _, outputs, __: answers(outputs)})()
    task.name = "own:Own"
    with refused("task.answers"):
        check_answers(task, np.zeros((2, 3), np.float32), Classes(["a", "b", "c"]))


def test_classes_are_answered_with_probabilities() -> None:
    (answer,) = Classes(["bad", "good"]).decode(np.array([[0.0, np.log(3.0)]], np.float32))
    assert answer == {"label": "good", "scores": {"bad": 0.25, "good": 0.75}}


def test_balanced_batches_have_all_classes_equally_often() -> None:
    classes = np.array([0] * 90 + [1] * 9 + [2])
    order = in_memory([0] * 100, 20, classes=classes.tolist(), is_balanced=True)
    rows = np.concatenate(batches_of(order, 1))
    assert sorted(np.bincount(classes[rows]).tolist()) == [33, 33, 34]
    assert set(np.bincount(rows[classes[rows] == 1])[90:].tolist()) <= {3, 4}
    assert not np.array_equal(rows, np.concatenate(batches_of(order, 2)))


def test_weights_of_classes_keep_the_mean_and_add_up_over_ranks() -> None:
    data = prepare(load_recipe(DIGITS, ["data.validation_fraction=0.2"]))
    weights = class_weights({str(digit): 1.0 + digit for digit in range(10)}, data)
    assert isinstance(data, LabelledData)
    of_rows = np.array(weights)[data.train.split.classes]
    assert of_rows.mean() == pytest.approx(1.0)
    assert weights[9] / weights[0] == pytest.approx(10.0)
    loss, outputs, targets = CrossEntropy(weights=weights), torch.randn(9, 10), torch.arange(9)
    parts = 4 * loss.mean(outputs[:4], targets[:4]) + 5 * loss.mean(outputs[4:], targets[4:])
    assert parts.item() / 9 == pytest.approx(loss.mean(outputs, targets).item())
    with refused("labels.unknown", "train.class_weights"):
        class_weights({"1": 2.0}, data)
    assert np.ptp(class_weights("balanced", data)) < 0.1  # the digits come about equally often


def test_weights_of_classes_leave_label_smoothing_even() -> None:
    loss, whole = CrossEntropy(label_smoothing=0.3, weights=(0.5, 1.0, 300.0)), torch.eye(3)
    smoothed = torch.tensor([0.8, 0.1, 0.1])  # what a row of class 0 should be predicted as
    for label, weight in enumerate([0.5, 1.0, 300.0]):
        outputs = smoothed.roll(label)[None].log().requires_grad_()
        value = loss.mean(outputs, torch.tensor([label]))
        value.backward()  # type: ignore[no-untyped-call]
        assert outputs.grad is not None
        assert outputs.grad.abs().max() < 1e-6 * weight
        assert value.item() == pytest.approx(weight * -(smoothed * smoothed.log()).sum().item())
        assert loss.mean(outputs, whole[[label]]).item() == pytest.approx(value.item()), "a row mixed with itself"
    outputs = torch.randn(1, 3)
    parts = [loss.mean(outputs, torch.tensor([label])).item() for label in range(3)]
    mixed = loss.mean(outputs, torch.tensor([[0.7, 0.1, 0.2]])).item()
    assert mixed == pytest.approx(0.7 * parts[0] + 0.1 * parts[1] + 0.2 * parts[2])
    alone = loss.mean(outputs, torch.tensor([1])).item()
    assert loss.mean(outputs.expand(3, 3), torch.tensor([IGNORED, 1, IGNORED])).item() == pytest.approx(alone)
    assert loss.mean(outputs, torch.tensor([IGNORED])).item() == 0.0


def test_the_best_epoch_is_chosen_by_a_metric_of_ones_own() -> None:
    fields = {"train_loss": 1.0, "val_loss": 1.0, "samples_per_s": 1.0}
    given = [
        EpochRecord.model_validate({"epoch": epoch, "step": epoch, "val_own": own, **fields})
        for epoch, own in enumerate([0.5, 0.75, math.nan, 0.7], start=1)
    ]
    records = [EpochRecord.model_validate_json(record.model_dump_json()) for record in given]
    assert [record.metrics["val_own"] for record in records[:2]] == [0.5, 0.75]
    config = TrainConfig.model_validate({"early_stopping": {"metric": "val_own", "mode": "max", "patience": 2}})
    assert best_of(records, Selection("val_own", "max")).epoch == 2
    assert config.early_stopping is not None
    assert should_stop(records, Selection("val_own", "max"), config.early_stopping)
    assert math.isnan(records[0].value_of("val_accuracy")), "a task without one"


def test_the_task_of_the_guide_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("guide_of_tasks")
    page = (ROOT / "docs/how-to/bring_your_own_task.md").read_text(encoding="utf-8")
    for code in re.findall("```python\n(.*?)```", page, re.DOTALL):
        exec(code, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (by_f1,) = find_served_task("guide_of_tasks:TicketsByF1").metrics
    assert (by_f1.name, by_f1.bind(Classes(["a", "b", "c"])).size) == ("f1", 1 + 4 * 3)
    task = find_served_task("guide_of_tasks:Tickets")
    (metric,) = task.metrics
    outputs, targets = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), torch.tensor([1, 2])
    assert metric.value(metric.sums(outputs, targets)) == 0.5
    objective = Objective(RowLoss(task.loss), (metric,))
    assert objective.values(objective.sums(outputs, targets)) == pytest.approx(
        {"val_loss": torch.nn.functional.cross_entropy(outputs, targets).item(), "val_top2": 0.5}
    )
