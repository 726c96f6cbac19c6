"""What a trial tells Ray Tune, and what it is told: plain values between processes."""

from typing import Literal

from pydantic import BaseModel

NUMBER, VALUES, LAST_REPORTED_EPOCH = "number", "values", "last_reported_epoch"
"""A trial's configuration: its number in the study, its values of recipe keys, the last epoch reported to the study."""

CLONED = "cloned"
"""In the configuration of a trial that will go on from another trial's checkpoint.

``LAST_REPORTED_EPOCH`` is then the epoch of that checkpoint.
"""

EPOCH, VALUE, ENDED = "epoch", "value", "ended"
"""What schedulers read: the time, the first objective; and whether the trial came to its own end."""


class EpochResult(BaseModel):
    """After an epoch."""

    epoch: int
    value: float | None
    """The first objective; None if it is measured at the end alone."""
    cost: float
    """By what training chooses the epoch whose weights it keeps: the lowest one."""


class FinalResult(EpochResult):
    """With the last epoch; or after it, if training stopped early and the epoch was reported before."""

    ended: Literal[True] = True
    done: Literal[True] = True
    """Ray Tune's word for it."""
    final_values: list[float]
    """Every objective, in the epoch whose weights training keeps."""
    stopped_early: bool
