"""When to stop early."""

from collections.abc import Sequence

from app.config import EarlyStoppingConfig


def should_stop(values: Sequence[float], config: EarlyStoppingConfig) -> bool:
    """Whether the last ``patience`` values brought nothing better than the best before them.

    With k = ``patience``, d = ``min_delta`` and mode ``min``, stop when there are more than k values and

        min(values[-k:]) > min(values[:-k]) - d,  or equal with d = 0;

    mode ``max`` is the same on negated values. So a value must be better by more than nothing, and by d at least.
    One that is not a number is worse than any other.
    """
    costs = [config.cost(value) for value in values]
    before, recent = costs[: -config.patience], costs[-config.patience :]
    if not before:
        return False
    return min(recent) >= min(before) or min(before) - min(recent) < config.min_delta
