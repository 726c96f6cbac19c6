"""The order that a recipe asks for: what it needs of the data, and what they cannot give."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.config import Recipe
from app.data.prepared import PreparedData
from app.errors import RecipeError, TrainingError
from app.training.data.mixture import Mixture, MixturePeriod
from app.training.data.order import SampleOrder
from app.training.data.rules import Curriculum, Rules
from app.training.data.samples import samples_of


def order_of(
    recipe: Recipe,
    data: PreparedData,
    difficulty: NDArray[np.float32] | None = None,
    periods: Sequence[MixturePeriod] = (),
    *,
    is_part: bool = False,
) -> SampleOrder:
    """Return the order of a recipe's training samples.

    Args:
        recipe: the recipe.
        data: its prepared data.
        difficulty: how hard each sample is, for a curriculum. Without it, batches have other samples, but as many.
        periods: the mixture periods that a run has recorded. By default, the recipe's mixture applies throughout.
        is_part: whether the data are one micro-epoch of many. Then samples with the same fields may fill no batch.

    Raises:
        RecipeError: a source has no share, or the processor counts no tokens, which the recipe needs.
        TrainingError: there are fewer samples than one batch takes, or too few for all workers.
    """
    config, size, num_samples = recipe.train, recipe.train.global_batch_size, len(data.train)
    if size is not None and num_samples < size:
        raise TrainingError(
            f"train.global_batch_size is {size}, the training split has {num_samples} samples: lower the batch size or "
            "give more data"
        ).of("batch.too_large", "train.global_batch_size")
    rules = Rules(
        size=size,
        budget=config.tokens_per_batch,
        padded_lengths=_padded_lengths(data) if config.tokens_per_batch is not None else None,
        groups=data.train.groups,
        is_balanced=recipe.data.sampling == "balanced",
        curriculum=Curriculum(difficulty, config.curriculum) if config.curriculum and difficulty is not None else None,
    )
    mixture = Mixture.of(recipe.data, data)
    if mixture and rules.groups is not None:
        raise RecipeError(
            "data.sources are not for samples that are in groups, such as records with other fields: give one source"
        ).of("sources.unsupported", "data.sources")
    mixtures = [(period.start, mixture.during(period)) for period in periods or [mixture.period()]] if mixture else []
    order = SampleOrder(samples_of(data.train), rules, config.seed, mixtures)
    for period in order.periods:
        period.require_sources()
    if not is_part:
        _require_room(recipe, order)
    return order


def _padded_lengths(data: PreparedData) -> NDArray[np.int32]:
    if (lengths := data.train.padded_lengths) is None:
        raise RecipeError(
            "train.tokens_per_batch needs a processor that counts tokens: give it padded_lengths, or set "
            "train.global_batch_size in its place"
        ).of("processor.no_padded_lengths", "train.tokens_per_batch")
    return lengths


def _require_room(recipe: Recipe, order: SampleOrder) -> None:
    """Raise TrainingError if a group fills no batch, or a micro-batch of some rank would have no sample in an epoch."""
    config, rules = recipe.train, order.rules
    if rules.kinds is None:
        return
    if rules.budget is None:
        _require_groups(order)
        return
    longest = rules.kinds.longest
    layouts = [config.layout(workers) for workers in config.worker_counts]
    parts = max(layout.data * layout.gradient_accumulation for layout in layouts)
    epochs = range(1, config.epochs + 1)
    fewest = min(order.min_samples(epoch) for epoch in epochs) if rules.budget >= longest else 0
    if fewest < parts:
        raise TrainingError(
            f"train.tokens_per_batch is {rules.budget}, and the longest sample has {longest} tokens: some batch has "
            f"{fewest} samples for {parts} micro-batches of all workers; give {2 * parts * longest} or more, or fewer "
            "workers"
        ).of("batch.too_small", "train.tokens_per_batch")


def _require_groups(order: SampleOrder) -> None:
    kinds, rules = order.rules.kinds, order.rules
    assert kinds is not None
    assert rules.groups is not None
    for number, name in enumerate(kinds.names):
        if not any(window[number] for window in order.periods[0].sizes(1)):
            count = int((rules.groups == name).sum())
            raise TrainingError(
                f"train.global_batch_size is {rules.size}, and {count} training samples have only {name}: a batch has "
                "samples with the same fields, of one window; lower the batch size, give more of these samples, or "
                "leave them out"
            ).of("batch.fields", "train.global_batch_size")


def count_steps(recipe: Recipe, order: SampleOrder) -> int:
    """Return the number of optimizer steps of the whole run. For a stream, return the maximum."""
    config, stream = recipe.train, recipe.data.stream
    if stream:
        total = config.epochs * (stream.samples // config.batch_size)
    else:
        total = sum(order.num_batches(epoch) for epoch in range(1, config.epochs + 1))
    return min(total, config.max_steps or total)
