"""What a run trains and how: resolved, built and checked once, then handed to the workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from app.config import Recipe
from app.data.augmentation import Augmentation, augmentation_of
from app.data.prepared import PreparedData
from app.tasks import find_task
from app.tasks.objective import Objective, objective_of
from app.training.data.mixture import MixturePeriod
from app.training.data.order import SampleOrder
from app.training.data.recipe_order import count_steps, order_of
from app.training.engine.deepspeed_engine import deepspeed_config


@dataclass(frozen=True)
class TrainingPlan:
    """What a run trains and how, without its data, which each worker loads."""

    recipe: Recipe
    """Resolved: with a parallel plan in place of ``auto``, and with what its pretrained model and teacher are."""
    objective: Objective
    augmentation: Augmentation | None
    """The changes of training samples, if there are any."""
    periods: Sequence[MixturePeriod]
    """The sources of the run and their shares, each from a batch on; empty if there is one source."""
    epoch_batches: int
    """Batches of the first epoch."""
    total_steps: int
    """Optimizer steps of the whole run. Of a stream, the maximum."""
    deepspeed: Mapping[int, dict[str, Any]]
    """DeepSpeed's configuration for each number of workers that the recipe allows."""

    @classmethod
    def of(cls, recipe: Recipe, data: PreparedData, periods: Sequence[MixturePeriod] = ()) -> Self:
        """Return the plan of a recipe whose parallel plan is chosen.

        Raises:
            RecipeError: the data lack what the recipe needs, or keys contradict each other.
            TrainingError: there are fewer samples than one batch takes.
        """
        config = recipe.train
        order = order_of(recipe, data, periods=periods)
        layouts = {workers: config.layout(workers) for workers in config.worker_counts}
        return cls(
            recipe=recipe,
            objective=objective_of(find_task(recipe.task), config, data),
            augmentation=augmentation_of(config, data),
            periods=periods,
            epoch_batches=order.num_batches(1),
            total_steps=count_steps(recipe, order),
            deepspeed={workers: deepspeed_config(config, layout) for workers, layout in layouts.items()},
        )

    def to_bytes(self) -> bytes:
        """Return the plan for ``pickle.loads``. Metrics may have functions that only ``cloudpickle`` can pickle."""
        pickled: bytes = cloudpickle.dumps(self)
        return pickled

    def order(self, data: PreparedData, difficulty: NDArray[np.float32] | None = None) -> SampleOrder:
        """Return the order of the training samples. It has ``total_steps`` steps, and is the same in every process."""
        return order_of(self.recipe, data, difficulty, self.periods)
