"""Pruning two of four weights, and training on with the zeros held."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from app.artifacts import WEIGHTS_FILE
from app.config import PruneConfig, load_recipe
from app.models.sparsity import hold_zeros, prune_2_to_4
from app.training.engine.pruning import require_same_model, start_pruned
from tests.helpers import ROOT, train_alone
from tests.wording import refused


def test_two_of_four_weights_along_the_input_channels_are_zero_the_smaller_ones() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(8, 5, 3),
        torch.nn.Linear(12, 3),
        torch.nn.MultiheadAttention(8, 2),
        torch.nn.MultiheadAttention(8, 2, kdim=4, vdim=12),
        torch.nn.Conv2d(1, 4, 3),
    )
    sparse = prune_2_to_4(model)
    attention = ("2.in_proj_weight", "2.out_proj.weight", "3.q_proj_weight", "3.k_proj_weight", "3.v_proj_weight")
    for name in ("0.weight", "1.weight", *attention):
        dense, kept = model.get_parameter(name), sparse.get_parameter(name)
        groups = [weight.movedim(1, -1).reshape(-1, 4) for weight in (dense, kept)]
        assert ((groups[1] != 0).sum(-1) == 2).all()
        least = groups[0].abs().masked_fill(groups[1] == 0, torch.inf).amin(-1)
        assert (groups[0].abs().masked_fill(groups[1] != 0, 0).amax(-1) <= least).all()
        assert torch.equal(groups[1][groups[1] != 0], groups[0][groups[1] != 0])
    assert torch.equal(model[4].weight, sparse[4].weight)


def test_weights_to_prune_must_have_every_tensor_of_the_model(tmp_path: Path) -> None:
    first, last = torch.nn.Linear(8, 4), torch.nn.Linear(4, 2)
    trained = OrderedDict(first=torch.nn.Linear(8, 4), last=torch.nn.Linear(4, 2))
    safetensors.torch.save_file(torch.nn.Sequential(trained).state_dict(), tmp_path / WEIGHTS_FILE)
    config = PruneConfig(weights=str(tmp_path))
    with refused("weights.other_model", "train.prune.weights"):
        start_pruned(torch.nn.Sequential(OrderedDict(first=first, head=last)), config)
    start_pruned(torch.nn.Sequential(OrderedDict(first=first, last=last)), config)
    assert torch.equal(last.bias, trained["last"].bias)
    assert torch.equal(first.weight, prune_2_to_4(trained["first"]).weight)


def test_zeros_are_held_on_the_device_to_which_the_weights_move(monkeypatch: pytest.MonkeyPatch) -> None:
    model, hooks = torch.nn.Linear(4, 2), list[Callable[[torch.Tensor], torch.Tensor]]()
    monkeypatch.setattr(model.weight, "register_hook", hooks.append, raising=False)
    assert hold_zeros(model) == len(hooks) == 1
    (hook,) = hooks
    assert hook(torch.ones(2, 4, device="meta")).device.type == "meta"


@pytest.mark.slow
def test_a_pruned_model_that_is_trained_on_keeps_its_zeros_and_its_accuracy(tmp_path: Path) -> None:
    storage = f"storage={tmp_path}"
    dense = train_alone(storage, "train.epochs=8", "train.early_stopping=null")
    weights = dense["artifacts"]["weights"]
    fine_tuning = [
        "train.epochs=4",
        "train.optimizer.lr=1e-3",
        "train.plan.zero_stage=2",
        f"train.prune.weights={weights}",
    ]
    sparse = train_alone(storage, *fine_tuning, processes=2)
    assert sparse["metrics"]["val_accuracy"] >= dense["metrics"]["val_accuracy"] - 0.01
    before, after = (
        safetensors.torch.load_file(Path(result["artifacts"]["weights"]) / "model.safetensors")
        for result in (dense, sparse)
    )
    pruned = 0
    for name, weight in after.items():
        if weight.dim() > 1 and weight.shape[1] % 4 == 0:
            groups = weight.movedim(1, -1).reshape(-1, 4)
            assert ((groups != 0).sum(-1) <= 2).all(), name
            assert not torch.equal(weight, before[name]), "it was trained on"
            pruned += 1
    assert pruned
    digits = ROOT / "recipes/digits.yaml"
    with refused("weights.other_model", "train.prune.weights"):
        require_same_model(load_recipe(digits, ["model.args.width=16", f"train.prune.weights={weights}"]))
    with refused("prune.split", "train.prune"):
        require_same_model(load_recipe(digits, ["train.plan.zero_stage=3", f"train.prune.weights={weights}"]))
