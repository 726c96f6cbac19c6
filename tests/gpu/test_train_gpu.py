"""Training on a GPU. Not run in CI, which has none: 'make test-gpu' on a machine with one."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from upath import UPath

from app.artifacts import WEIGHTS_FILE
from app.telemetry.usage import read_usage
from tests.gpu.training import train_on_gpu
from tests.helpers import SGD, folder_of, losses, steps_of, train_alone, write_sums

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none")


def test_a_gpu_draws_the_same_curve_as_a_cpu() -> None:
    on_cpu = losses(train_alone(*SGD))
    assert losses(train_on_gpu(*SGD)) == pytest.approx(on_cpu, abs=1e-2)


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
    result = train_on_gpu(*overrides)
    assert result["metrics"]["val_accuracy"] >= 0.97
    step = steps_of(folder_of(result))[0]
    assert 0.0 <= step["memory"]["fragmentation"] < 1.0
    assert ("loss_scale" in step) is ("train.precision=fp16" in overrides)
    usage = read_usage(UPath(folder_of(result)))[-1]
    assert usage.energy_j["gpu"] > 0
    assert usage.gpu_busy_s is not None
    assert 0 < usage.gpu_busy_s <= usage.seconds


@pytest.mark.parametrize(
    ("gpus", "keys"),
    [
        (1, "{quantized_weights: true}"),
        pytest.param(
            2,
            "{quantized_weights: true, quantized_gradients: true, hpz_partition_size: 2}",
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
        ),
    ],
)
def test_zero_plus_plus_learns_the_sums(gpus: int, keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))  # qgZ takes all it sees for the run's
    result = train_on_gpu(
        *("train.precision=bf16", f"train.plan={{zero_stage: 3, zero_plus_plus: {keys}}}"),
        "train.deepspeed={zero_optimization: {stage3_param_persistence_threshold: 1000}}",  # or all would stay whole
        *(f"data.source={write_sums(tmp_path / 'corpus')}", "data.tokenizer={kind: bytes}", "data.block_length=32"),
        *("train.epochs=4", "train.early_stopping=null"),
        processes=gpus,
        recipe="recipes/stdlib_gpt.yaml",
    )
    assert losses(result)[-1] < 0.7 * losses(result)[0]


@pytest.mark.parametrize("plan", ["{zero_stage: 0}", "{zero_stage: 2}"])
def test_a_pruned_model_keeps_its_zeros(plan: str) -> None:
    dense = train_on_gpu("train.epochs=1")["artifacts"]["weights"]
    sparse = train_on_gpu("train.epochs=1", f"train.plan={plan}", f"train.prune.weights={dense}")["artifacts"][
        "weights"
    ]
    after = safetensors.torch.load_file(Path(sparse) / WEIGHTS_FILE)
    matrices = [weight for weight in after.values() if weight.dim() > 1 and weight.shape[1] % 4 == 0]
    assert matrices
    for weight in matrices:
        assert ((weight.movedim(1, -1).reshape(-1, 4) != 0).sum(-1) <= 2).all()


def test_a_run_in_fp16_goes_on_with_its_loss_scale() -> None:
    run = ["train.precision=fp16", "train.max_steps=20", "train.checkpoint.every_steps=1",
           "model.factory=tests.faults.models:LoudCnn"]  # fmt: skip
    whole = steps_of(folder_of(train_on_gpu(*run)))
    stopped = train_on_gpu(*run, "name=parts", "alerts=[{metric: step, above: 9, do: [stop]}]")
    assert stopped["status"] == "stopped"
    parts = steps_of(folder_of(train_on_gpu(*run, "name=parts", "train.resume=latest")))
    next_step = stopped["metrics"]["steps"]
    assert parts[next_step]["loss_scale"] == whole[next_step]["loss_scale"] < whole[0]["loss_scale"]
