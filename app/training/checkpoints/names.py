"""The names of a checkpoint's tensors: ``parameter/NAME/KEY``, ``buffer/NAME`` and ``rank/RANK/…``.

NAME is the one in the whole model. The first word tells the kind, so that no two tensors meet,
whatever a model calls its own.
"""

from collections.abc import Iterable

WEIGHT = "weight"
"""The KEY of a parameter itself; any other is one of its optimizer state."""


def parameter(name: str, key: str) -> str:
    """A parameter's float32 weight, or a part of its optimizer state."""
    return f"parameter/{name}/{key}"


def buffer(name: str) -> str:
    """A buffer of the model, the mean over the data-parallel ranks."""
    return f"buffer/{name}"


def random(name: str) -> str:
    """The state of a generator of random numbers; always a process's own."""
    return f"random/{name}"


def own(rank: int, name: str) -> str:
    """What only one process needs."""
    return f"rank/{rank}/{name}"


def keys_of(name: str, saved: Iterable[str]) -> set[str]:
    """What a checkpoint with the tensors ``saved`` has of a parameter."""
    parts = (name.rpartition("/") for name in saved)
    return {key for owner, _, key in parts if owner == f"parameter/{name}"}


def in_model(saved: str) -> str | None:
    """The name that a weight or a buffer has in the whole model; None for all else."""
    kind, _, rest = saved.partition("/")
    if kind == "parameter":
        name, _, key = rest.rpartition("/")
        return name if key == WEIGHT else None
    return rest if kind == "buffer" else None
