"""Which samples a run was trained on, and which it should have been."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from app.config import load_recipe
from app.tasks import prepare
from app.training.data.recipe_order import order_of
from tests.faults.models import fingerprints, text_fingerprints

RECIPE = "recipes/digits.yaml"


def written_in(folder: Path) -> Counter[str]:
    """How often the processes that wrote into ``folder`` have seen each sample."""
    return Counter(line for file in folder.iterdir() for line in file.read_text(encoding="utf-8").splitlines())


def expected(epochs: int, overrides: Sequence[str] = (), recipe_file: str = RECIPE) -> Counter[str]:
    """How often each picture or text is in the batches of so many epochs: an incomplete last batch is left out."""
    recipe = load_recipe(recipe_file, list(overrides))
    data = prepare(recipe)
    samples, order = data.train, order_of(recipe, data)
    inputs = {name: torch.from_numpy(rows) for name, rows in samples.batch(range(len(samples))).inputs.items()}
    names = fingerprints(**inputs) if "pixel_values" in inputs else text_fingerprints(**inputs)
    numbers = [(epoch, number) for epoch in range(1, epochs + 1) for number in range(order.num_batches(epoch))]
    return Counter(names[index] for at in numbers for index in order.batch(*at))
