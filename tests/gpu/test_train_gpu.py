"""Training on a GPU. Not run in CI, which has none: 'make test-gpu' on a machine with one."""

import pytest
import torch

from tests.helpers import SGD, losses, train_alone

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none")


def test_a_gpu_draws_the_same_curve_as_a_cpu() -> None:
    on_cpu = losses(train_alone(*SGD))
    assert losses(train_alone(*SGD, "train.device=gpu")) == pytest.approx(on_cpu, abs=1e-2)


@pytest.mark.parametrize("stage", [1, 2])
def test_bf16_learns_the_digits(stage: int) -> None:
    result = train_alone("train.device=gpu", "train.precision=bf16", f"train.plan.zero_stage={stage}")
    assert result["metrics"]["val_accuracy"] >= 0.97
