"""Choose the order of a recipe's training samples, and check that recipe and data allow it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.config import Recipe
from app.data.labelled import LabelledData
from app.data.prepared import Dataset, PreparedData
from app.errors import RecipeError, TrainingError
from app.training.data.batches import MemoryOrder, SampleOrder
from app.training.data.curriculum import CurriculumOrder
from app.training.data.groups import GroupedOrder
from app.training.data.mixed_orders import MixedOrder, MixtureOrder
from app.training.data.mixed_shards import MixedShardOrder
from app.training.data.mixture import Mixture, MixturePeriod
from app.training.data.shard_order import ShardOrder
from app.training.data.tokens import token_order_of


def order_of(
    recipe: Recipe,
    data: PreparedData,
    difficulty: NDArray[np.float32] | None = None,
    periods: Sequence[MixturePeriod] = (),
) -> SampleOrder:
    """Return the order of a recipe's training samples.

    Args:
        recipe: the recipe.
        data: its prepared data.
        difficulty: how hard each sample is, for a curriculum. Without it, batches have other samples, but as many.
        periods: the mixture periods that a run has recorded. By default, the recipe's mixture applies throughout.

    Raises:
        RecipeError: batches are sized in tokens, and the samples have no length in tokens; or a source has no share.
        TrainingError: there are fewer samples than one batch takes.
    """
    config, size, seed = recipe.train, recipe.train.global_batch_size, recipe.train.seed
    if config.tokens_per_batch is not None:
        return token_order_of(config, data)
    assert size is not None
    if (num_samples := len(data.train)) < size:
        raise TrainingError(
            f"train.global_batch_size is {size}, the training split has {num_samples} samples: lower the batch size or "
            "give more data"
        )
    if recipe.data.sources and (mixture := Mixture.of(recipe.data, data)):
        return _mixed_order(data.train, size, seed, mixture, periods)
    if data.train.shards:
        return ShardOrder(data.train.shards, size, seed)
    lengths, groups = data.train.lengths, data.train.groups
    if groups is not None:
        return GroupedOrder(lengths, size, seed, groups=groups)
    if config.curriculum and difficulty is not None:
        return CurriculumOrder(lengths, size, seed, difficulty=difficulty, config=config.curriculum)
    if recipe.data.sampling == "natural":
        return MemoryOrder(lengths, size, seed)
    assert isinstance(data, LabelledData)  # recipes of other tasks are refused
    return MemoryOrder(lengths, size, seed, data.train.split.classes)


def _mixed_order(
    samples: Dataset, size: int, seed: int, mixture: Mixture, periods: Sequence[MixturePeriod]
) -> MixtureOrder:
    """Return the order of several sources over the recorded periods of a run, or over one period if it has none."""
    in_memory: MixedOrder | None = None
    in_shards: MixedShardOrder | None = None
    for period in periods or [mixture.period()]:
        given, start = mixture.during(period), period.start
        if samples.shards:
            in_shards = MixedShardOrder(samples.shards, size, seed, mixture=given, start=start, earlier=in_shards)
        else:
            in_memory = MixedOrder(samples.lengths, size, seed, mixture=given, start=start, earlier=in_memory)
    found = in_shards or in_memory
    assert found is not None
    return found


def count_steps(recipe: Recipe, order: SampleOrder) -> int:
    """Return the number of optimizer steps of the whole run. For a stream, return the maximum."""
    config, stream = recipe.train, recipe.data.stream
    if stream:
        total = config.epochs * (stream.samples // config.batch_size)
    else:
        total = sum(order.num_batches(epoch) for epoch in range(1, config.epochs + 1))
    return min(total, config.max_steps or total)


def check_order(recipe: Recipe, data: PreparedData) -> None:
    """Check that the data can be read in the recipe's order, and log how it differs from the default.

    Raises:
        RecipeError, TrainingError: as ``order_of``, or the data has no such order.
    """
    if data.train.groups is not None:
        _require_groups_alone(recipe)
    if recipe.data.sources:
        if (mixture := Mixture.of(recipe.data, data)) is None:
            raise RecipeError(
                f"data.sources are not for task {recipe.task}, which prepares its data itself: give one source"
            )
        print(f"data.sources: {mixture} of an epoch", flush=True)
    order = order_of(recipe, data)
    if tokens := recipe.train.tokens_per_batch:
        batches = order.num_batches(1)
        mean = len(data.train) / batches
        print(f"train.tokens_per_batch {tokens:,}: {batches:,} batches of {mean:.1f} samples on average", flush=True)


def _require_groups_alone(recipe: Recipe) -> None:
    """Raise RecipeError if a recipe, whose samples have groups, asks for another order."""
    orders = {
        "data.sampling": recipe.data.sampling != "natural",
        "train.curriculum": recipe.train.curriculum is not None,
        "data.sources": bool(recipe.data.sources),
    }
    if given := [key for key, is_given in orders.items() if is_given]:
        raise RecipeError(
            f"{given[0]} orders all samples together, and a batch of task {recipe.task} has samples with the same "
            "fields only: leave it out"
        )
