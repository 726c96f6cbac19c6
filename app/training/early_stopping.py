"""When to stop early."""

from collections.abc import Sequence

from app.config import EarlyStoppingConfig


def should_stop(values: Sequence[float], config: EarlyStoppingConfig) -> bool:
    """Whether the last ``patience`` values brought nothing better than the best before them.

    With k = ``patience``, d = ``min_delta`` and mode ``min``, stop when there are more than k values and

        min(values[-k:]) > min(values[:-k]) - d,  or equal with d = 0;

    mode ``max`` is the same on negated values. So a value must be better by more than nothing, and by d at least.
    """
    sign = 1.0 if config.mode == "min" else -1.0
    signed = [sign * value for value in values]
    before, recent = signed[: -config.patience], signed[-config.patience :]
    if not before:
        return False
    improvement = min(before) - min(recent)
    return improvement <= 0.0 or improvement < config.min_delta
