"""Which part of each parameter's float32 weight and optimizer state this process holds, under any plan."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from app.config import Layout
from app.errors import TrainingError
from app.training.engine import TrainingEngine
from app.training.engine.masters import master_pairs


@dataclass(frozen=True)
class Slice:
    """How a parameter lies in the whole model's: along ``dim``, from ``start``; ``dim`` None is all of it."""

    whole_shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0


@dataclass(frozen=True)
class Fragment:
    """A run of elements of a parameter, and where the optimizer keeps their float32 weight and state.

    The elements are ``start`` to ``start + length`` of the flattened local parameter, and lie in ``master``
    from ``offset`` on; the optimizer's state of ``master`` has the same order.
    """

    name: str
    cut: Slice
    local_shape: tuple[int, ...]
    start: int
    length: int
    master: Tensor
    offset: int
    is_owned: bool
    """Whether this process is the one that writes it: replicas are written once."""

    def of(self, flat: Tensor) -> Tensor:
        """The elements in ``flat``, which has the order of ``master``: a view of shape (length,)."""
        return flat.detach().view(-1).narrow(0, self.offset, self.length)


def fragments_of(engine: TrainingEngine, layout: Layout) -> list[Fragment]:
    """All that this process holds of the parameters; of those that are not trained, the weight itself."""
    rank = torch.distributed.get_rank()
    masters = {id(low): master for low, master in master_pairs(engine.deepspeed.optimizer)}
    return [
        _fragment(engine.names[id(parameter)], parameter, held, layout, rank)
        for parameter in engine.deepspeed.module.parameters()
        if (held := _held(engine.deepspeed, parameter, masters)) is not None
    ]


def by_master(fragments: Iterable[Fragment]) -> list[list[Fragment]]:
    """The fragments of each master together."""
    found: dict[int, list[Fragment]] = {}
    for fragment in fragments:
        found.setdefault(id(fragment.master), []).append(fragment)
    return list(found.values())


@dataclass(frozen=True)
class _Held:
    """The part of a local parameter that this rank keeps."""

    master: Tensor
    offset: int
    start: int
    length: int
    is_partition: bool
    """Whether other data-parallel ranks hold the rest; otherwise each holds all."""


def _held(engine: Any, parameter: nn.Parameter, masters: Mapping[int, Tensor]) -> _Held | None:
    """None: the parameter lies wholly in other ranks."""
    if hasattr(parameter, "ds_id"):
        return _held_zero_3(engine.optimizer, parameter)
    if hasattr(parameter, "_hp_mapping"):
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        master = engine.optimizer.param_groups[mapping.param_group_index]["params"][0]
        address = mapping.get_hp_fragment_address()
        return _Held(master, address.start, mapping.lp_fragment_address.start, address.numel, is_partition=True)
    return _Held(masters.get(id(parameter), parameter), 0, 0, parameter.numel(), is_partition=False)


def _held_zero_3(optimizer: Any, parameter: Any) -> _Held | None:
    size = parameter.partition_numel()
    start = size * torch.distributed.get_rank(parameter.ds_process_group)
    length = max(0, min(size, parameter.ds_numel - start))  # the last partition is padded
    if not length:
        return None
    if not parameter.requires_grad:
        return _Held(parameter.ds_tensor, 0, start, length, is_partition=True)
    group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
    return _Held(optimizer.fp32_partitioned_groups_flat[group], offset, start, length, is_partition=True)


def _fragment(name: str, parameter: Any, held: _Held, layout: Layout, rank: int) -> Fragment:
    cut = _slice_of(parameter, layout.tensor_rank(rank))
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    is_first_replica = layout.tensor_rank(rank) == 0 or cut.dim is not None
    is_written_here = held.is_partition or layout.data_rank(rank) == 0
    is_owned = is_first_replica and is_written_here and not getattr(parameter, "ds_pipe_replicated", False)
    return Fragment(name, cut, shape, held.start, held.length, held.master, held.offset, is_owned)


def _slice_of(parameter: Any, tensor_rank: int) -> Slice:
    """From what DeepSpeed's tensor-parallel layers note on a parameter."""
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    meta = getattr(parameter, DS_AUTOTP_UC_META, None)
    if meta is None or meta["partition_dim"] is None:
        return Slice(tuple(getattr(parameter, "ds_shape", parameter.shape)))
    if meta["partition_sizes"] is None:
        raise TrainingError(
            "DeepSpeed cuts a matrix of this model (queries, keys and values in one) in a way that a checkpoint cannot "
            "undo: train it with plan.tensor 1"
        )
    start = sum(meta["partition_sizes"][:tensor_rank])
    return Slice(tuple(meta["original_shape"]), meta["partition_dim"], start)


def boxes_of(fragment: Fragment, flat: Tensor) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """A fragment as rectangles of the whole parameter, seen as a matrix of its first dimension by the rest.

    A run of elements is the end of a row, whole rows, and the beginning of a row; any of them may be missing.

    Yields:
        The rectangle's first row and column in the whole matrix, and a view of ``flat`` of its shape.
    """
    row0, column0 = _corner(fragment.cut)
    width = _columns(fragment.local_shape)
    position, left = fragment.start, fragment.length
    elements = fragment.of(flat)
    while left:
        row, column = divmod(position, width)
        rows = left // width if column == 0 and left >= width else 1
        length = rows * width if column == 0 and left >= width else min(left, width - column)
        first = position - fragment.start
        yield (row0 + row, column0 + column), elements[first : first + length].view(rows, -1)
        position, left = position + length, left - length


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """A parameter of any shape as a matrix of its first dimension by the rest."""
    return (shape[0] if shape else 1, _columns(shape))


def _columns(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape[1:]).numel())


def _corner(cut: Slice) -> tuple[int, int]:
    return (cut.start, 0) if cut.dim == 0 else (0, cut.start) if cut.dim == 1 else (0, 0)
