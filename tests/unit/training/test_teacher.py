"""Distillation: what a teacher adds to the loss, what it is asked, and what is refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.nn import functional
from upath import UPath

from app.config import Recipe, TeacherConfig, load_recipe
from app.data.images import ImageProcessor
from app.data.labelled import LabelledData
from app.engines.base import Signature
from app.planner.cluster import local_cluster
from app.repository.repository import Repository
from app.runs import Run
from app.tasks import prepare
from app.tasks.objective import CrossEntropy
from app.tensors import TensorSpec
from app.training.difficulty import recorded_difficulty, require_difficulty
from app.training.teacher import TaughtDataset, kept_rows, with_resolved_teacher
from app.tuning.space import load_space
from app.tuning.trial_data import prepare_trials
from jobs.tune import start_or_resume
from tests.engine_contract import PROCESSOR, SIGNATURE
from tests.helpers import ROOT, SGD, folder_of, losses, train_alone
from tests.toy import publish_version
from tests.wording import refused

DIGITS = str(ROOT / "recipes/digits.yaml")
SWAPPED = {3: 5, 5: 3}
"""The teacher takes each of these digits for the other."""


@pytest.fixture(scope="module")
def data() -> LabelledData:
    prepared = prepare(load_recipe(DIGITS))
    assert isinstance(prepared, LabelledData)
    return prepared


@pytest.fixture(scope="module")
def storage(data: LabelledData, tmp_path_factory: pytest.TempPathFactory) -> UPath:
    """Where the teacher is published: the distance to the mean picture of each digit, its labels in reverse order."""
    folder = UPath(tmp_path_factory.mktemp("storage"))
    split = data.train.batch(range(len(data.train)))
    pixels = split.inputs["pixel_values"].reshape(len(data.train), -1)
    means = np.stack([pixels[split.targets == digit].mean(0) for digit in range(10)])
    means = means[[SWAPPED.get(digit, digit) for digit in reversed(range(10))]]
    weight, bias = means.T.astype(np.float32), (-0.5 * (means**2).sum(1)).astype(np.float32)
    nodes = [
        helper.make_node("Flatten", ["pixel_values"], ["flat"]),
        helper.make_node("Gemm", ["flat", "w", "b"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "teacher",
        [helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["rows", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows", 10])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(bias, "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    signature = Signature(data.processor.inputs, (TensorSpec("logits", np.dtype(np.float32), (-1, 10)),))
    processor = ImageProcessor(load_recipe(DIGITS).data.image)
    labels = [str(digit) for digit in reversed(range(10))]
    assert publish_version(folder, "teacher", model.SerializeToString(), signature, processor, labels) == 1
    Repository(folder).promote("teacher", 1)
    assert publish_version(folder, "letters", model.SerializeToString(), signature, processor, list("abcdefghij")) == 1
    return folder


def test_the_loss_is_that_of_the_paper() -> None:
    torch.manual_seed(0)
    ours, theirs, classes = torch.randn(4, 3), torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    teacher = TeacherConfig(model="large", temperature=3.0, weight=0.6)
    soft, log_soft = functional.softmax(theirs / 3, -1), functional.log_softmax(ours / 3, -1)
    divergence = (soft * (soft.log() - log_soft)).sum(-1).mean()
    expected = 0.4 * functional.cross_entropy(ours, classes) + 0.6 * 9 * divergence
    loss = CrossEntropy(teacher=teacher)
    torch.testing.assert_close(loss.mean(ours, classes, theirs), expected)
    torch.testing.assert_close(loss.mean(ours, classes), functional.cross_entropy(ours, classes)), "of validation"
    assert loss.mean(theirs, classes, theirs).isclose(0.4 * functional.cross_entropy(theirs, classes))


def test_a_row_is_shown_to_the_teacher_once_and_its_labels_are_put_in_order(
    data: LabelledData, storage: UPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    real = ImageProcessor.encode
    monkeypatch.setattr(ImageProcessor, "encode", lambda self, inputs: asked.append(len(inputs)) or real(self, inputs))
    taught = TaughtDataset.of(data.train, "teacher/1", storage)
    asked.clear()
    batch = taught.batch(range(100))
    assert batch.taught is not None
    predicted = batch.taught.argmax(1)
    swapped = np.array([SWAPPED.get(digit, digit) for digit in batch.targets.tolist()])
    assert (predicted == swapped).mean() > 0.85
    assert asked.count(32) == 3, "calls of the teacher have 32 rows at most"
    asked.clear()
    again = taught.batch(range(50, 110))
    assert sorted(asked) == [10, 60], "the teacher sees the ten new rows, the student all"
    np.testing.assert_array_equal(again.taught[:50], batch.taught[50:])  # type: ignore[index]


def test_a_process_keeps_few_logits_of_many_rows_and_asks_for_the_others_again(
    data: LabelledData, storage: UPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept_rows(1_000_000, 1_000) * 1_000 * 4 <= 2**28
    whole = TaughtDataset.of(data.train, "teacher/1", storage).batch(range(100))
    monkeypatch.setattr("app.training.teacher._MAX_KEPT_BYTES", 60 * len(data.labels) * 4)
    asked = []
    real = ImageProcessor.encode
    monkeypatch.setattr(ImageProcessor, "encode", lambda self, inputs: asked.append(len(inputs)) or real(self, inputs))
    taught = TaughtDataset.of(data.train, "teacher/1", storage)
    for _ in range(2):
        asked.clear()
        again = taught.batch(range(100))
        np.testing.assert_allclose(again.taught, whole.taught, rtol=1e-5)  # type: ignore[arg-type]
    assert sorted(asked) == [8, 32, 100], "the teacher sees the 40 rows that are not kept, the student all"


def test_a_student_of_the_teacher_alone_learns_its_mistakes(storage: UPath) -> None:
    result = train_alone(
        f"storage={storage}", "train.epochs=6", "train.teacher={model: teacher, weight: 1.0}", recipe=DIGITS
    )
    run = folder_of(result)
    assert load_recipe(str(run / "config.yaml")).train.teacher == TeacherConfig(model="teacher/1", weight=1.0)
    matrix = np.array(json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["matrix"])
    for digit, taken_for in SWAPPED.items():
        assert matrix[digit].argmax() == taken_for
    assert matrix[0].argmax() == 0


def test_all_trials_of_a_search_and_its_best_recipe_have_one_version_of_the_teacher(storage: UPath) -> None:
    keys = [f"storage={storage}", "train.teacher.model=teacher"]
    run = Run.start("tune", load_recipe(DIGITS, keys))
    assert run.recipe.tune
    _, varied = prepare_trials(run, run.recipe.tune, load_space(run.recipe.tune.space, run.recipe), local_cluster)
    assert [recipe.value_of("train.teacher.model") for recipe in (varied, run.recipe)] == ["teacher/1"] * 2
    run.open()
    resumed = start_or_resume("tune", load_recipe(DIGITS, [*keys, "tune.resume=true"]))
    assert (resumed.run_id, resumed.recipe.value_of("train.teacher.model")) == (run.run_id, "teacher/1")


def test_two_workers_learn_of_a_teacher_as_one_does(storage: UPath) -> None:
    overrides = [
        f"storage={storage}",
        "train.teacher.model=teacher/1",
        *SGD,
        "train.max_steps=6",
        "train.report_samples=0",
    ]
    one, two = (losses(train_alone(*overrides, processes=count, recipe=DIGITS)) for count in (1, 2))
    np.testing.assert_allclose(one, two, rtol=1e-5)


def test_samples_that_the_model_takes_for_others_are_hard(data: LabelledData, storage: UPath, tmp_path: Path) -> None:
    keys = [f"storage={storage}", "train.curriculum={by: loss, model: teacher}"]
    recipe = load_recipe(DIGITS, keys)
    resolved = require_difficulty(recipe, data, UPath(tmp_path))
    assert resolved.value_of("train.curriculum.model") == "teacher/1"
    beats: list[int] = []
    found = recorded_difficulty(recipe, data, UPath(tmp_path), lambda: beats.append(1))
    assert len(beats) == math.ceil(len(data.train) / 256), "a run that asks for long is not taken for one that hangs"
    classes = np.array(data.train.split.classes)
    is_swapped = np.isin(classes, list(SWAPPED))
    assert found.shape == classes.shape
    assert np.median(found[is_swapped]) > 10 * np.median(found[~is_swapped])
    unsuitable = load_recipe(DIGITS, [keys[0], "train.curriculum={by: loss, model: letters/1}"])
    with refused("teacher.labels"):
        require_difficulty(unsuitable, data, UPath(tmp_path / "other"))


def recipe_with(**teacher: object) -> Recipe:
    return load_recipe(DIGITS, [f"train.teacher={json.dumps(teacher)}"])


def test_a_teacher_that_does_not_suit_is_refused(data: LabelledData, storage: UPath) -> None:
    with refused("teacher.labels"):
        with_resolved_teacher(recipe_with(model="letters/1"), data, storage)
    several = publish_version(
        storage, "several", b"-", SIGNATURE, PROCESSOR, list("0123456789"), task="text-multilabel"
    )
    with refused("teacher.labels"):
        with_resolved_teacher(recipe_with(model=f"several/{several}"), data, storage)
    with refused("production.none"):
        with_resolved_teacher(recipe_with(model="nobody"), data, storage)
    with refused("recipe.string_pattern_mismatch", "train.teacher.model"):
        recipe_with(model="A B")
    with refused("recipe.greater_than", "train.teacher.weight"):
        recipe_with(model="teacher", weight=0.0)
    with refused("task.unsupported", "train.teacher"):
        load_recipe(ROOT / "recipes/stdlib_gpt.yaml", ["train.teacher={model: teacher}"])
