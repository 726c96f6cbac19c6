"""The plan of a run: resolved and checked once, and the same in every process that gets it."""

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn import metrics

from app.config import AutoPlan, load_recipe
from app.data.prepared import PreparedData
from app.runs import Run
from app.tasks import SklearnMetric, prepare
from app.tasks.classification import ImageClassification
from app.training.plan import TrainingPlan
from app.training.run import prepare_run
from tests.helpers import ROOT, in_fork
from tests.wording import refused

DIGITS = ROOT / "recipes/digits.yaml"
MORE = [
    "train.augment={image: {flip: 0.5}, mix: {mixup: 0.2}}",
    "train.class_weights=balanced",
    "train.workers=[1, 3]",
    "train.global_batch_size=60",
    f"task={__name__}:Judged",
]


class Judged(ImageClassification):
    """A metric with a function that pickle cannot name."""

    metrics = (
        *ImageClassification.metrics,
        SklearnMetric(
            "f1", lambda *pair: metrics.f1_score(*pair, average="macro"), inputs=lambda a, b: (a.argmax(-1), b)
        ),
    )


@pytest.fixture(scope="module")
def data() -> PreparedData:
    return prepare(load_recipe(DIGITS))


def test_a_run_is_as_it_was_after_its_plan_is_made() -> None:
    run = Run.start("train", load_recipe(DIGITS))
    given = run.recipe
    plan, data = prepare_run(run)
    assert run.recipe is given
    assert isinstance(given.train.plan, AutoPlan)
    assert not isinstance(plan.recipe.train.plan, AutoPlan)
    assert not run.folder.exists()
    assert plan.total_steps == plan.order(data).num_batches(1) * given.train.epochs


def test_a_worker_gets_what_was_built_and_builds_the_same_order(data: PreparedData) -> None:
    plan = TrainingPlan.of(load_recipe(DIGITS, MORE), data)
    with pytest.raises(Exception, match=r"Can't (pickle|get)"):
        pickle.dumps(plan)
    found = pickle.loads(plan.to_bytes())
    assert (found.recipe, found.total_steps, found.deepspeed) == (plan.recipe, plan.total_steps, plan.deepspeed)
    assert [*found.deepspeed] == [1, 2, 3]
    assert found.objective.loss == plan.objective.loss
    assert [metric.name for metric in found.objective.metrics] == ["accuracy", "f1"]
    assert all(np.array_equal(found.order(data).batch(2, n), plan.order(data).batch(2, n)) for n in range(20))
    assert plan.augmentation
    assert found.augmentation
    rows = ([3, 5, 8], [5, 8, 3], 1, 0)
    ours, theirs = (one.batch(data.train, *rows) for one in (plan.augmentation, found.augmentation))  # type: ignore[arg-type]
    assert np.array_equal(ours.inputs["pixel_values"], theirs.inputs["pixel_values"])
    assert np.array_equal(ours.targets, theirs.targets)


def print_steps() -> None:
    print(pickle.loads(Path(sys.argv[1]).read_bytes()).total_steps)


def test_another_process_reads_a_plan(data: PreparedData, tmp_path: Path) -> None:
    recipe = load_recipe(DIGITS, MORE)
    (tmp_path / "plan").write_bytes(TrainingPlan.of(recipe, data).to_bytes())
    done = in_fork(f"{__name__}:print_steps", str(tmp_path / "plan"))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == TrainingPlan.of(recipe, data).total_steps


def test_a_key_of_deepspeed_is_checked_for_every_number_of_workers(data: PreparedData) -> None:
    keys = [
        "train.workers=[1, 2]",
        "train.deepspeed={gradient_accumulation_steps: 1, train_micro_batch_size_per_gpu: 32}",
    ]
    with refused("deepspeed.own_key", "train.deepspeed"):
        TrainingPlan.of(load_recipe(DIGITS, keys), data)
