"""What a trial tells Ray Tune, and what it is told: plain values between processes."""

from typing import Literal

from pydantic import BaseModel

NUMBER, VALUES, HEARD = "number", "values", "heard"
"""A trial's configuration: its number in the study, its values of recipe keys, the last epoch that the study has."""

CLONED = "cloned"
"""In a configuration with which a trial will go on from another's checkpoint, after the epoch ``HEARD`` of that one."""

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
