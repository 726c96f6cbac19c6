"""Learning-rate schedules, as a factor of the optimizer's rate."""

import math

from app.config import ScheduleConfig


def lr_factor(step: int, total_steps: int, config: ScheduleConfig) -> float:
    """The factor for optimizer step ``step``, from 0.

    It rises linearly to 1 over the first ``warmup_fraction`` of the steps; then it stays (constant), or
    falls to 0 at the last step along a line or half a cosine (Loshchilov and Hutter 2016, arXiv:1608.03983).
    """
    warmup = int(config.warmup_fraction * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    match config.name:
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case "linear":
            return 1.0 - progress
        case "constant":
            return 1.0
