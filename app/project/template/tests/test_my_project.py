"""The recipe, the model and the search space fit each other: no cluster is needed."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from app.config import load_recipe
from app.models.factory import build_model
from app.tasks import prepare
from app.tuning.space import load_space

ROOT = Path(__file__).parents[1]
RECIPE = load_recipe(ROOT / "recipes/my_project.yaml")


def test_the_model_learns_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # a relative path of the recipe is meant from there
    torch.manual_seed(0)
    data = prepare(RECIPE)
    model = build_model(RECIPE.model, data.facts)
    batch = data.train.batch(range(32))
    inputs = [torch.from_numpy(tensor) for tensor in batch.inputs.values()]
    targets = torch.from_numpy(batch.targets)
    assert model(*inputs).shape == (32, data.facts["num_labels"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = cross_entropy(model(*inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_the_space_draws_keys_of_the_recipe() -> None:
    assert RECIPE.tune
    assert load_space(RECIPE.tune.space, RECIPE).distributions
