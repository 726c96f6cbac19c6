"""A batch that breaks the numbers stops the run before anything of it is kept, or is left out."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.config import load_recipe
from app.tasks import prepare
from app.training.data.recipe_order import order_of
from tests.faults.models import fingerprints
from tests.helpers import in_fork, records_of, result_of, steps_of
from tests.launch import newest_step, tensors_of
from tests.orders import batches_of
from tests.receiver import HttpReceiver
from tests.tables import Faults

pytestmark = pytest.mark.faults
RECIPE, EPOCHS = "recipes/digits.yaml", 2
NUMBER, STEPS = 9, 22
"""The broken batch of the first epoch, and how many there are; the same picture is in one of the second."""
RUN = ["train.early_stopping=null", "train.checkpoint.every_steps=4",
       "train.checkpoint.num_to_keep=99", "train.resume=latest"]  # fmt: skip


@pytest.fixture(scope="module")
def poison(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A picture that rank 1 meets in batch ``NUMBER`` of both epochs: in the second, a while after a checkpoint.

    Its label is the one that ``InfiniteCnn`` rules out.
    """
    recipe = load_recipe(RECIPE, [])
    data: Any = prepare(recipe)
    pictures, order = data.train, order_of(recipe, data)
    first, second = (np.array(batches_of(order, epoch)) for epoch in (1, 2))
    met_by_rank_1 = [index for index in first[NUMBER, 1::2].tolist() if index in second[:, 1::2]]
    chosen = next(index for index in met_by_rank_1 if pictures.split.classes[index] == 0)
    return fingerprints(torch.from_numpy(pictures.batch([chosen]).inputs["pixel_values"]))[0]


def train(model: str, poison: str, *overrides: str, epochs: int = EPOCHS) -> tuple[dict[str, Any], str]:
    """Train on two ranks. Return the result and the output."""
    poisoned = [f"model.factory=tests.faults.models:{model}", f"model.args.poison=['{poison}']"]
    done = in_fork("app.training", RECIPE, *RUN, f"train.epochs={epochs}", *poisoned, *overrides, processes=2)
    result = result_of(done.stdout)
    assert (done.returncode == 0) is (result["status"] != "failed"), done.stdout + done.stderr
    return result, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("model", "whose", "metric"),
    [
        ("PoisonedCnn", "the loss of rank 1", "loss"),
        pytest.param("SteepCnn", "the gradient, and no rank's loss,", "grad_norm", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_is_not_finite_stops_the_run_tells_and_can_be_left_out(
    tmp_path: Path,
    http: Callable[..., HttpReceiver],
    poison: str,
    faults: Faults,
    model: str,
    whose: str,
    metric: str,
) -> None:
    storage, receiver = tmp_path / "storage", http(200)
    rule = {"metric": metric, "not_finite": True, "do": ["notify"]}
    alerts = [f"alerts={json.dumps([rule])}", f"notify.webhook={json.dumps({'url': receiver.url})}"]
    with faults("T9", f"torchrun: {model}: {whose.rstrip(',')}", "all ranks stop; told; nothing of it kept") as fault:
        stopped, _ = train(model, poison, *alerts)
        error = stopped["error"]
        assert f"step {NUMBER + 1}: {whose} is not finite (epoch 1, batch {NUMBER})" in error
        (folder,) = storage.glob("runs/train/*")
        assert newest_step(storage) == NUMBER // 4 * 4
        logged = records_of(folder)
        assert [record["step"] for record in logged] == list(range(1, 1 + len(logged)))
        assert [record["step"] for record in logged if not math.isfinite(record[metric])] == [NUMBER + 1]
        (told,) = [json.loads(body) for _, body in receiver.requests]
        assert (told["rule"], told["step"], told["epoch"]) == (f"{metric} is not finite", NUMBER + 1, 1)
        for checkpoint in folder.glob("checkpoints/*"):
            assert all(tensor.double().isfinite().all() for tensor in tensors_of(checkpoint).values())
        fault.saw(error.partition("(")[0].strip())
    with faults("T9", f"the same, {model}, rollback", "goes on without the batch, in each epoch; told") as fault:
        result, printed = train(model, poison, *alerts, "train.non_finite=rollback")
        assert result["status"] == "succeeded", printed
        assert result["metrics"]["steps"] == EPOCHS * (STEPS - 1)
        assert [record["step"] for record in steps_of(folder)] == list(range(1, 1 + 2 * (STEPS - 1)))
        for epoch in records_of(folder):
            losses = [record["loss"] for record in steps_of(folder) if record["epoch"] == epoch["epoch"]]
            assert "loss" in epoch or epoch["train_loss"] == pytest.approx(sum(losses) / len(losses))
        fault.saw(f"{printed.count('without this batch')} batches left out")
        assert printed.count("without this batch") == EPOCHS
        assert len(receiver.requests) == 1 + EPOCHS


@pytest.mark.slow
def test_a_rollback_forgets_the_errors_that_powersgd_feeds_back(poison: str) -> None:
    """They hold the gradient that was not finite, and would put it into every later step."""
    plan = "train.plan={zero_stage: 0, powersgd: {rank: 2}}"
    result, printed = train("PoisonedCnn", poison, "train.non_finite=rollback", plan)
    assert result["status"] == "succeeded", printed
    assert printed.count("without this batch") == EPOCHS


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_seen_where_its_gradient_is_and_the_fourth_batch_ends_the_run(
    poison: str, faults: Faults
) -> None:
    with faults("T9", "torchrun: an infinite loss, a finite gradient, rollback", "seen before it is kept") as fault:
        stop = "alerts=[{metric: step, above: 35, do: [stop]}]"
        stopped, printed = train("InfiniteCnn", poison, "train.non_finite=rollback", stop, epochs=9)
        assert stopped["status"] == "stopped"
        fault.saw(f"{printed.count('without this batch')} batches left out")
        assert printed.count("without this batch") == 2
        words = f"warning: step {NUMBER + 1}: the loss of rank 1 is not finite (epoch 1, batch {NUMBER})"
        assert words in printed
    with faults("T9", "the same, stopped and gone on with", "the fourth batch ends the run") as fault:
        failed, printed = train("InfiniteCnn", poison, "train.non_finite=rollback", epochs=9)
        assert printed.count("without this batch") == 1
        error = failed["error"]
        assert "is not finite (epoch 4, batch" in error
        assert error.endswith("; 3 were left out, no run leaves out more")
        fault.saw(error.partition("(")[0].strip())


@pytest.mark.parametrize(
    "metric",
    ["{metric: val_accuracy, mode: max}", pytest.param("{metric: val_loss, mode: min}", marks=pytest.mark.slow)],
)
def test_a_run_without_a_finite_validation_publishes_nothing(metric: str, tmp_path: Path) -> None:
    """The accuracy of answers without a number is a number: that of the first class."""
    model = ["model.factory=tests.faults.models:MuteCnn", "train.workers=1", f"train.early_stopping={metric}"]
    done = in_fork("app.training", RECIPE, "train.epochs=1", *model, processes=1)
    result = result_of(done.stdout)
    assert result["status"] == "failed", done.stdout
    assert "no epoch has a finite val_loss" in result["error"]
    assert ": epoch 1 has val_loss nan" in result["error"]
    assert "(best)" not in done.stdout
    (folder,) = tmp_path.glob("storage/runs/train/*")
    assert not (folder / "weights").exists()
