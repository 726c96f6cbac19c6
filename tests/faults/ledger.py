"""Which pictures a run was trained on, and which it should have been."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from app.config import TrainConfig, load_recipe
from app.data.prepared import Dataset
from app.tasks import prepare
from app.training.data.batches import Indices, shards_of, train_batches
from app.training.data.streams import StreamOrder
from tests.faults.models import fingerprints

RECIPE = "recipes/digits.yaml"


def written_in(folder: Path) -> Counter[str]:
    """How often the processes that wrote into ``folder`` have seen each picture."""
    return Counter(line for file in folder.iterdir() for line in file.read_text(encoding="utf-8").splitlines())


def expected(epochs: int, overrides: Sequence[str] = ()) -> Counter[str]:
    """How often each picture is in the batches of so many epochs: an incomplete last batch is left out."""
    recipe = load_recipe(RECIPE, list(overrides))
    pictures = prepare(recipe).train
    names = fingerprints(torch.from_numpy(pictures.batch(range(len(pictures))).inputs["pixel_values"]))
    batches = [batch for epoch in range(1, epochs + 1) for batch in _batches(pictures, recipe.train, epoch)]
    return Counter(names[index] for batch in batches for index in batch)


def _batches(pictures: Dataset, config: TrainConfig, epoch: int) -> Iterator[Indices]:
    if (shards := shards_of(pictures)) is None:
        yield from train_batches(pictures.lengths, config.global_batch_size, config.seed, epoch)
        return
    order = StreamOrder(shards, config.global_batch_size, config.seed)
    yield from (order.batch(epoch, number) for number in range(order.batches_per_epoch))
