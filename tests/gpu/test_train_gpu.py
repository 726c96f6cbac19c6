"""Training on a GPU. Not run in CI, which has none: 'make test-gpu' on a machine with one."""

import pytest
import torch

from tests.helpers import SGD, folder_of, losses, steps_of, train_alone

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none")


def test_a_gpu_draws_the_same_curve_as_a_cpu() -> None:
    on_cpu = losses(train_alone(*SGD))
    assert losses(train_alone(*SGD, "train.device=gpu")) == pytest.approx(on_cpu, abs=1e-2)


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.precision=bf16", "train.plan.zero_stage=1"],
        ["train.precision=bf16", "train.plan.zero_stage=2"],
        ["train.precision=bf16", "train.plan.zero_stage=3"],
        ["train.precision=fp16", "train.plan.zero_stage=2"],
        ["train.precision=bf16", "train.plan={zero_stage: 2, offload: cpu}"],
        ["train.plan={zero_stage: 0, powersgd: {rank: 4}}"],
        ["train.precision=bf16", "train.torch_compile=true"],
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_plans_learn_the_digits(overrides: list[str]) -> None:
    result = train_alone("train.device=gpu", *overrides)
    assert result["metrics"]["val_accuracy"] >= 0.97
    step = steps_of(folder_of(result))[0]
    assert 0.0 <= step["memory"]["fragmentation"] < 1.0
    assert ("loss_scale" in step) is ("train.precision=fp16" in overrides)
