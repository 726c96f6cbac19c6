"""Which pictures a run was trained on, and which it should have been."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from app.config import load_recipe
from app.tasks import prepare
from app.training.data.batches import order_of
from tests.faults.models import fingerprints

RECIPE = "recipes/digits.yaml"


def written_in(folder: Path) -> Counter[str]:
    """How often the processes that wrote into ``folder`` have seen each picture."""
    return Counter(line for file in folder.iterdir() for line in file.read_text(encoding="utf-8").splitlines())


def expected(epochs: int, overrides: Sequence[str] = ()) -> Counter[str]:
    """How often each picture is in the batches of so many epochs: an incomplete last batch is left out."""
    recipe = load_recipe(RECIPE, list(overrides))
    data = prepare(recipe)
    pictures, order = data.train, order_of(recipe.train, data)
    names = fingerprints(torch.from_numpy(pictures.batch(range(len(pictures))).inputs["pixel_values"]))
    numbers = [(epoch, number) for epoch in range(1, epochs + 1) for number in range(order.num_batches(epoch))]
    return Counter(names[index] for at in numbers for index in order.batch(*at))
