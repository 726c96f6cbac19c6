"""What a trial is judged by once it has ended is measured on its own model."""

import time

from torch import Tensor, nn

from app.config import Objective
from app.tasks import prepare
from app.training.records import EpochRecord
from app.tuning.objectives import final_values
from tests.studies import recipe_with
from tests.wording import refused

CALL_S, FIRST_CALL_S = 0.01, 0.5


class Slow(nn.Module):
    """Takes so long for one picture, longer at first, and far too long for more or in training."""

    def __init__(self, call_s: float) -> None:
        super().__init__()
        self.head, self.call_s, self.is_warm = nn.Linear(64, 10), call_s, False

    def forward(self, pixel_values: Tensor) -> Tensor:
        assert not self.training
        assert len(pixel_values) == 1
        time.sleep(self.call_s if self.is_warm else FIRST_CALL_S)
        self.is_warm = True
        logits: Tensor = self.head(pixel_values.flatten(1))
        return logits


def record(epoch: int, accuracy: float) -> EpochRecord:
    return EpochRecord(
        epoch=epoch, step=epoch, train_loss=1.0, val_loss=float(epoch), val_accuracy=accuracy, samples_per_s=1.0
    )


def test_latency_and_parameters_are_measured_and_the_rest_is_of_the_best_epoch() -> None:
    recipe = recipe_with(f"model.factory={__name__}:Slow", f"model.args={{call_s: {CALL_S}}}")
    objectives = [
        Objective("latency_ms", "min"),
        Objective("parameters", "min"),
        Objective("val_accuracy", "max"),
        Objective("val_loss", "min"),
    ]
    records = [record(1, 0.5), record(2, 0.9), record(3, 0.7)]
    latency_ms, *others = final_values(objectives, records, recipe, prepare(recipe))
    assert 1000.0 * CALL_S <= latency_ms < 1000.0 * FIRST_CALL_S
    assert others == [64 * 10 + 10, 0.9, 2.0]


def test_a_value_that_is_not_finite_is_a_failure_of_the_trial() -> None:
    broken = record(1, 0.5).model_copy(update={"val_loss": float("nan")})
    with refused("non_finite_loss"):
        final_values([Objective("val_loss", "min")], [broken], recipe_with(), prepare(recipe_with()))
