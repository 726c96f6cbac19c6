"""A step has the gradient of its samples, and all workers share one model, including its batch norm statistics."""

import json
import math
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.nn import functional
from upath import UPath

from app.tasks import prepare
from app.training.checkpoints.names import buffer, own
from app.training.checkpoints.reader import export_weights
from tests.helpers import in_fork
from tests.launch import newest_checkpoint, state_of, tensors_of
from tests.parity.numerics import NormalisedCnn, recipe_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numerics")
    done = in_fork("tests.parity.numerics", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def losses(folder: Path) -> dict[str, list[float]]:
    found: dict[str, dict[str, list[float]]] = json.loads((folder / "two_ranks.json").read_bytes())
    return found["losses"]


@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_one_sample_many_times_has_the_gradient_of_the_sample(folder: Path, ranks: str) -> None:
    norms = json.loads((folder / f"{ranks}.json").read_bytes())["grad norms"]
    assert norms
    assert all(math.isfinite(once) for once, _ in norms.values())
    assert {plan: many for plan, (_, many) in norms.items()} == pytest.approx(
        {plan: once for plan, (once, _) in norms.items()}, rel=1e-4
    )


@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.parametrize("what", ["uneven", "batch norm"])
def test_two_ranks_train_the_model_of_one_process(losses: dict[str, list[float]], what: str, zero_stage: int) -> None:
    """Train with 67 samples per rank, in micro-batches of 34 and 33, and with batch norm over both ranks' samples."""
    assert losses[f"ZeRO {zero_stage}, {what}"] == pytest.approx(losses[f"plain, {what}"], abs=1e-5)


def test_all_workers_validate_and_keep_one_model(folder: Path, tmp_path: Path) -> None:
    """Each worker has seen different samples, so its own running statistics differ."""
    recipe, checkpoint = recipe_of(), newest_checkpoint(folder / "run")
    saved = tensors_of(checkpoint)
    kept = [name for name in saved if name.startswith(buffer(""))]
    assert any(name.endswith("running_mean") for name in kept)
    for name in kept:
        assert torch.equal(saved[name], saved[own(0, name)])
        assert torch.equal(saved[name], saved[own(1, name)])
    export_weights(UPath(checkpoint), tmp_path / "weights.safetensors")
    validation = prepare(recipe).validation
    batch = validation.batch(range(len(validation)))
    model = NormalisedCnn(num_labels=10, channels=1).eval()
    safetensors.torch.load_model(model, str(tmp_path / "weights.safetensors"))
    with torch.no_grad():
        logits = model(torch.from_numpy(batch.inputs["pixel_values"]))
    loss = functional.cross_entropy(logits, torch.from_numpy(batch.targets)).item()
    (reported,) = json.loads((folder / "two_ranks.json").read_bytes())["run"]["val_loss"]
    assert loss == pytest.approx(reported, rel=1e-5)


def test_running_statistics_go_on_to_the_bit_when_a_run_was_stopped_within_an_epoch(folder: Path) -> None:
    stopped = tensors_of(folder / "parts" / "checkpoints" / "step_00000003")
    first, second, kept = (
        next(tensor for name, tensor in stopped.items() if name.startswith(whose) and name.endswith("running_mean"))
        for whose in ("rank/0/", "rank/1/", "buffer/")
    )
    assert not torch.equal(first, second)
    assert torch.allclose(kept, (first + second) / 2)
    assert state_of(newest_checkpoint(folder / "parts")) == state_of(newest_checkpoint(folder / "run"))


def test_a_checkpoint_that_one_rank_cannot_write_ends_in_its_error_in_the_others(folder: Path) -> None:
    error = (folder / "lost-checkpoint.txt").read_text(encoding="utf-8")
    assert "step_00000001' cannot be written: [Errno 2] No such file or directory" in error
    assert str(folder / "missing") in error


def test_no_rank_holds_more_than_its_part_of_the_model(folder: Path) -> None:
    """A whole model in float32 takes 4 bytes per parameter. Training with ZeRO 0 takes 16 (arXiv:1910.02054)."""
    peaks = json.loads((folder / "two_ranks.json").read_bytes())["peaks"]
    assert {plan: made for plan, (made, _) in peaks.items() if made > 3.0} == {}
    assert peaks["ZeRO 0"][1] < 16.0
