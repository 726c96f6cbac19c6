"""The phases of a training step, as marks in a profiler's trace."""

from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum

import torch
from torch.profiler import record_function


class Phase(StrEnum):
    """What the training loop is at; each is the name of its mark."""

    DATA = "rayloom.data"
    FORWARD = "rayloom.forward"
    BACKWARD = "rayloom.backward"
    OPTIMIZER = "rayloom.optimizer"


def phase(name: Phase) -> AbstractContextManager[object]:
    """Mark the code inside as one phase of the step; phases do not lie inside one another.

    A mark costs about 15 µs while a profiler records, and 1 µs else.
    """
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return nullcontext()  # record_function would cost the same as while recording
    return record_function(name.value)
