"""The names of a checkpoint's tensors: ``parameter/NAME/KEY``, ``buffer/NAME`` and ``rank/RANK/…``.

NAME is the one in the whole model. The first word is the kind, so that no two names collide, whatever names a model
uses.
"""

import re
from collections.abc import Iterable

FROZEN = "frozen"
"""The word in the names of files with weights that training never changes."""
FROZEN_METADATA = f".{FROZEN}.metadata"
WEIGHT = "weight"
"""The KEY of a parameter itself. Other keys are of its optimizer state."""


def is_frozen_file(name: str) -> bool:
    """Return whether a file of a checkpoint has weights that training never changes, or belongs to one that has."""
    return name == FROZEN_METADATA or re.match(rf"__\d+_{FROZEN}_", name) is not None


def parameter(name: str, key: str) -> str:
    """Name a parameter's float32 weight, or a tensor of its optimizer state."""
    return f"parameter/{name}/{key}"


def buffer(name: str) -> str:
    """Name a buffer of the model, averaged over the data-parallel ranks."""
    return f"buffer/{name}"


def random(name: str) -> str:
    """Name the state of a random number generator. It always belongs to one process."""
    return f"random/{name}"


def own(rank: int, name: str) -> str:
    """Name a tensor that only one process needs."""
    return f"rank/{rank}/{name}"


def keys_of(name: str, saved: Iterable[str]) -> set[str]:
    """Return the keys of a parameter among the tensors ``saved`` of a checkpoint."""
    parts = (name.rpartition("/") for name in saved)
    return {key for owner, _, key in parts if owner == f"parameter/{name}"}


def in_model(saved: str) -> str | None:
    """Return the name of a weight or buffer in the whole model; None for other tensors."""
    kind, _, rest = saved.partition("/")
    if kind == "parameter":
        # The name of a parameter may have slashes, and its key has none.
        name, _, key = rest.rpartition("/")
        return name if key == WEIGHT else None
    return rest if kind == "buffer" else None
