"""Bytes that a rank holds of the parameters, their gradients and the optimizer's state."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class States:
    """Bytes of one rank, by what they are for."""

    parameters: int
    gradients: int
    optimizer: int
    """The optimizer's averages, and the float32 weights that it updates."""

    @property
    def total(self) -> int:
        """Bytes of all three."""
        return self.parameters + self.gradients + self.optimizer


def states_of(engine: Any, seen: set[int] | None = None) -> States:
    """Return what DeepSpeed's ``engine`` holds. Between the last backward pass and the step, gradients are there.

    A storage counts where it is first found. ``seen`` has the addresses of those that do not count, and gets the rest.
    """
    seen = set() if seen is None else seen
    kinds: tuple[Iterable[Tensor], ...] = (_parameters(engine), _gradients(engine), _optimizer_state(engine))
    return States(*(sum(new_bytes(tensor, seen) for tensor in tensors) for tensors in kinds))


def new_bytes(tensor: Tensor, seen: set[int]) -> int:
    """Return the size of the tensor's storage and add it to ``seen``, or 0 if it is there."""
    storage = tensor.untyped_storage()
    if storage.data_ptr() in seen or not storage.data_ptr():
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()


def _parameters(engine: Any) -> Iterator[Tensor]:
    for parameter in engine.module.parameters():
        yield parameter.data
        if hasattr(parameter, "ds_tensor"):  # this rank's part, under ZeRO 3
            yield parameter.ds_tensor


def _gradients(engine: Any) -> Iterator[Tensor]:
    for parameter in engine.module.parameters():
        # ZeRO 1 adds micro-batches up in an attribute of its own, and without ZeRO the pipeline does so in float32
        for name in ("grad", "grad_accum", "_hp_grad"):
            gradient = getattr(parameter, name, None)
            if isinstance(gradient, Tensor):
                yield gradient
    for reduced in getattr(engine.optimizer, "averaged_gradients", {}).values():
        yield from reduced or []
    yield from getattr(engine.optimizer, "fp32_groups_gradients_flat", [])


def _optimizer_state(engine: Any) -> Iterator[Tensor]:
    for weight, averages in engine.basic_optimizer.state.items():
        yield weight
        yield from (value for value in averages.values() if isinstance(value, Tensor))
