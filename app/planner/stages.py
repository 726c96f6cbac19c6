"""How a pipeline cuts a model's layers into stages."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from app.planner.profile import LayerProfile, ModelProfile, count_parameters

Stage = tuple[LayerProfile, ...]


def stages_of(profile: ModelProfile, pipeline: int) -> tuple[Stage, ...]:
    """Return the layers of each stage, in order, as DeepSpeed cuts them: balanced by parameters."""
    layers = profile.layers
    if pipeline == 1:
        return (layers,)
    bounds = balanced_cuts(tuple(layer.parameters for layer in layers), pipeline)
    return tuple(layers[start:end] for start, end in pairwise(bounds))


def held_parameters(stage: Stage, tensor: int) -> float:
    """Return the elements that a rank holds of a stage, before data-parallel ranks split them."""
    whole = count_parameters(stage)
    split = sum({layer.tied or number: layer.split_parameters for number, layer in enumerate(stage)}.values())
    return whole - split * (1 - 1 / tensor)


# Cached, because every plan with as many stages asks for the same cuts.
@lru_cache(maxsize=256)
def balanced_cuts(weights: Sequence[int], parts: int) -> tuple[int, ...]:
    """Return the bounds of ``parts`` runs of ``weights`` whose largest and smallest sums differ least.

    DeepSpeed 0.19.8 cuts so (``deepspeed.runtime.utils.partition_balanced``): by the linear partition problem, of equal
    costs the one with the last cut furthest back.
    """
    count = len(weights)
    if count <= parts:
        return tuple(min(part, count) for part in range(parts + 1))

    # Dynamic programming. Row ``part``, column ``end``: the best way to cut the first ``end`` weights into ``part``
    # runs, with its largest and smallest sum, its cost, and where its last run begins.
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    largest = np.full((parts + 1, count + 1), np.inf)
    smallest, cost = largest.copy(), largest.copy()
    position = np.zeros((parts + 1, count + 1), dtype=int)
    largest[0, 0] = cost[0, 0] = 0.0
    for part in range(1, parts + 1):
        for end in range(part, count + 1):
            last = sums[end] - sums[:end]
            highest = np.maximum(largest[part - 1, :end], last)
            lowest = np.minimum(smallest[part - 1, :end], last)
            with np.errstate(invalid="ignore"):  # infinity less infinity: no such cut
                costs = np.nan_to_num(highest - lowest, nan=np.inf)
            # The search goes from the back, so the last of equal costs wins, as in DeepSpeed.
            cut = end - 1 - int(np.argmin(costs[::-1]))
            position[part, end], cost[part, end] = cut, costs[cut]
            largest[part, end], smallest[part, end] = highest[cut], lowest[cut]

    bounds = [count]
    for part in range(parts, 0, -1):
        bounds.append(int(position[part, bounds[-1]]))
    return tuple(reversed(bounds))
