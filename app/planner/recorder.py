"""A model on fake tensors, and what its layers do there: operations, bytes, and what tensor parallelism splits."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import flop_registry

from app.config.plan import Precision
from app.models.precision import TORCH_DTYPES
from app.models.staged import ShardStyle
from app.planner.profile import LayerProfile, SavedActivations, Work
from app.telemetry.mfu import OTHER_OPERATIONS

SAMPLES = 2
"""Samples of the pass. Batch norm needs two."""


@dataclass
class FakeModel:
    """A copy of the model on fake tensors, what is known of its parameters, and the inputs."""

    model: nn.Module
    inputs: dict[str, Tensor]
    cuts: dict[int, ShardStyle]
    """How tensor parallelism cuts a parameter, by the identity of its storage."""
    parameters: set[int]
    """Identities of all parameters' storages."""
    output: Tensor = field(default_factory=lambda: torch.empty(SAMPLES, 1))

    @classmethod
    def of(
        cls, model: nn.Module, inputs: Mapping[str, Tensor], precision: Precision, cuts: Mapping[str, ShardStyle]
    ) -> "FakeModel":
        """Copy ``model`` within a ``FakeTensorMode``, in ``precision``. Tied parameters stay tied.

        Args:
            cuts: how tensor parallelism cuts the Linears, by name.
        """
        dtype = TORCH_DTYPES[precision]

        def fake(tensor: Tensor) -> Tensor:
            return torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype)

        # ``deepcopy`` takes these instead of copying the real tensors.
        memo: dict[int, Any] = {id(buffer): fake(buffer) for buffer in model.buffers()}
        memo |= {id(parameter): nn.Parameter(fake(parameter)) for parameter in model.parameters()}
        copied = copy.deepcopy(model, memo).train()
        samples = {
            name: torch.zeros((SAMPLES, *tensor.shape[1:]), dtype=dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in inputs.items()
        }
        by_storage: dict[int, ShardStyle] = {}
        for name, cut in cuts.items():
            by_storage |= {storage_of(parameter): cut for parameter in copied.get_submodule(name).parameters()}
        return cls(copied, samples, by_storage, {storage_of(parameter) for parameter in copied.parameters()})


def storage_of(tensor: Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata
    return identity


class Recorder(TorchDispatchMode):
    """Counts the operations of the layer that runs, and marks what tensor parallelism would split.

    Outputs of a matrix that is cut by columns are split, and what is computed from them, up to a matrix cut by rows.
    """

    def __init__(self, fakes: FakeModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes = fakes
        self._split: set[int] = set()
        self._kept: list[Any] = []
        """Storages, so that no identity is used again."""
        self.begin()

    def begin(self) -> None:
        """Start a layer."""
        self.whole, self.split = Work(), Work()
        self.saved: dict[int, tuple[float, bool]] = {}
        self.column_inputs: set[int] = set()
        self.row_cuts = 0

    def layer(self, name: str, parameters: Iterable[nn.Parameter], output: Tensor | None, tied: str | None) -> Any:
        """Return what was counted since ``begin``, of one sample."""
        given = list(parameters)
        share = 1 / SAMPLES
        split = sum(size for size, is_split in self.saved.values() if is_split)
        return LayerProfile(
            name=name,
            parameters=sum(parameter.numel() for parameter in given),
            split_parameters=sum(parameter.numel() for parameter in given if storage_of(parameter) in self._fakes.cuts),
            whole_work=_per_sample(self.whole),
            split_work=_per_sample(self.split),
            saved=SavedActivations(
                whole=(sum(size for size, _ in self.saved.values()) - split) * share, split=split * share
            ),
            boundary_bytes=output.nbytes * share if output is not None else 0.0,
            column_inputs=len(self.column_inputs),
            row_cuts=self.row_cuts,
            tied=tied,
            tensor_shapes=tuple(tuple(parameter.shape) for parameter in given),
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_iter(made) if isinstance(leaf, Tensor)]
        # A view moves no bytes.
        if not func.is_view and given and outputs:
            self._count(func, args, kwargs or {}, made, given, outputs)
        return made

    def _count(self, func: Any, args: Any, kwargs: Any, made: Any, given: list[Tensor], outputs: list[Tensor]) -> None:
        self._kept += [tensor.untyped_storage() for tensor in outputs]
        cut = next(
            (self._fakes.cuts[storage_of(tensor)] for tensor in given if storage_of(tensor) in self._fakes.cuts), None
        )
        activations = [tensor for tensor in given if storage_of(tensor) not in self._fakes.parameters]
        is_split = cut is not None or any(storage_of(tensor) in self._split for tensor in activations)
        work = _work_of(func, args, kwargs, made, activations, outputs, has_weight=len(activations) < len(given))
        if is_split:
            self.split += work
        else:
            self.whole += work
        if cut == "colwise" and work.matmul_flops:
            self.column_inputs |= {storage_of(tensor) for tensor in activations}
        self.row_cuts += bool(cut == "rowwise" and work.matmul_flops)
        # The outputs of a matrix cut by rows are summed over the workers, so they are whole again.
        if is_split and cut != "rowwise":
            self._split |= {storage_of(tensor) for tensor in outputs}

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Count what autograd saves."""

        def pack(tensor: Tensor) -> Tensor:
            key = storage_of(tensor)
            # Parameters are held anyway, and a tensor that is saved twice is kept once.
            if key not in self._fakes.parameters:
                self.saved.setdefault(key, (float(tensor.nbytes), key in self._split))
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


def _per_sample(work: Work) -> Work:
    kernels = work.kernels
    # A launch takes as long for one sample as for several.
    return work * (1 / SAMPLES) + Work(kernels=kernels * (1 - 1 / SAMPLES))


def _work_of(
    func: Any, args: Any, kwargs: Any, made: Any, activations: list[Tensor], outputs: list[Tensor], has_weight: bool
) -> Work:
    """Return the work of one operation. Products of activations with each other are attention's."""
    moved = float(sum(tensor.nbytes for tensor in (*activations, *outputs)))
    packet = func.overloadpacket
    count = OTHER_OPERATIONS.get(packet) or flop_registry.get(packet)
    if count is None:
        return Work(moved_bytes=moved, kernels=1)
    shapes = packet in OTHER_OPERATIONS
    # The weights of a recurrent layer are a list.
    values = tree_map_only(Tensor, lambda tensor: tensor.shape, args) if shapes else args
    flops = float(count(*values) if shapes else count(*args, **kwargs, out_val=made))
    if has_weight:
        return Work(matmul_flops=flops, matmul_bytes=moved, kernels=1)
    is_fused = "attention" in packet.__name__
    return Work(attention_flops=flops, attention_bytes=0.0 if is_fused else moved, kernels=1)
