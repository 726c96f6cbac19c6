"""Recording of the operations that initialize a model, while its factory runs on fake tensors.

torch has no public API for fake tensors, nor for the trees of arguments that a dispatch mode receives. So this module
uses ``torch._subclasses``, ``torch.utils._pytree``, storage addresses (``_cdata``) and operator schemas (``_schema``).
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

_COMPUTED = frozenset({"arange", "linspace", "logspace", "scalar_tensor"})
"""Operations that run immediately, because factories read their values."""
_UNINITIALIZED = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"})
_OVERWRITES = frozenset(
    {"normal_", "uniform_", "zero_", "fill_", "copy_", "bernoulli_", "exponential_", "log_normal_", "random_"}
)


class UnrecordableError(Exception):
    """The factory does something that cannot be deferred, such as reading a value."""


@dataclass(frozen=True)
class Window:
    """A tensor as a view of a storage."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.shape, self.stride

    def over(self, storage: UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True)
class Operation:
    """A recorded operation, ready for replay."""

    function: Any
    arguments: tuple[Any, ...]
    """Fake tensors are recorded as windows, real tensors as constants."""
    options: Mapping[str, Any]
    results: tuple[Window | None, ...]
    """Results with a new storage; None for a view of an argument."""
    overwrites: int | None
    """The storage whose previous content is overwritten completely."""

    def touches(self) -> list[int]:
        """Return each storage that it reads or writes, once, in the order of the arguments and results."""
        given = [leaf for leaf in tree_iter((self.arguments, self.options)) if isinstance(leaf, Window)]
        return list(dict.fromkeys(window.storage for window in (*given, *self.results) if window is not None))


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record a factory's operations on fake tensors. These report the CPU as their device, and have no memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.storages: dict[int, UntypedStorage] = {}
        """Storages of the fake tensors, kept alive so that no identity is reused."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        given = [leaf for leaf in tree_iter((args, options)) if isinstance(leaf, Tensor)]
        name = func.overloadpacket.__name__
        # No fake tensor takes part, so the operation can run now.
        if not any(isinstance(tensor, FakeTensor) for tensor in given) and (given or name in _COMPUTED):
            with unset_fake_temporarily():
                return func(*args, **options)
        if torch.device(options.get("device") or "cpu").type != "cpu":
            raise UnrecordableError(f"{func} makes a tensor on {options['device']}")
        _refuse_writes_to_constants(func, args)
        recorded = tree_map_only(Tensor, self._window_or_constant, (args, options))
        made = func(*args, **options)
        self._record(func, name, recorded, made)
        return made

    def window(self, tensor: Tensor) -> Window:
        """Return the view of its storage that ``tensor`` is."""
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = storage
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return Window(storage._cdata, shape, stride, int(tensor.storage_offset()), tensor.dtype)

    def _record(self, func: Any, name: str, recorded: Any, made: Any) -> None:
        results = tuple(
            self.window(result) if isinstance(result, Tensor) and not self._is_known(result) else None
            for result in (made if isinstance(made, list | tuple) else (made,))
        )
        # A view needs no replay, because its window says all of it.
        is_view = not func._schema.is_mutable and all(result is None for result in results)
        if is_view or name in _UNINITIALIZED:
            return
        arguments, options = recorded
        target = arguments[0] if arguments and isinstance(arguments[0], Window) else None
        overwritten = target.storage if target and name in _OVERWRITES and self._covers(target) else None
        self.operations.append(Operation(func, arguments, options, results, overwritten))

    def _is_known(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.storages

    def _covers(self, window: Window) -> bool:
        size = torch.Size(window.shape).numel() * window.dtype.itemsize
        return window.offset == 0 and size == self.storages[window.storage].nbytes()

    def _window_or_constant(self, tensor: Tensor) -> "Window | Tensor":
        if isinstance(tensor, FakeTensor):
            return self.window(tensor)
        with unset_fake_temporarily():
            # The factory may change a constant before the replay.
            return tensor.detach().clone()


def _refuse_writes_to_constants(func: Any, args: tuple[Any, ...]) -> None:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            raise UnrecordableError(f"{func} writes into an existing tensor")


@contextmanager
def silent_fakes() -> Iterator[None]:
    """Silence torch's logs of operations that fake tensors refuse: the model is then built without them."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def swappable_fakes() -> Iterator[None]:
    """Let ``nn.Module.to`` convert fake parameters, which it does by ``torch.utils.swap_tensors``.

    torch refuses to swap a tensor that has weak references. The fake mode's memo holds some, but only to tensors whose
    operation is new to it. So the first build in a process was not recorded, later ones were, and the two drew other
    random values. Attributes that a factory set stay with the parameter, as they do in a conversion of real ones.
    """
    swap, of_fakes = torch.utils.swap_tensors, fake_attributes()

    def swap_fakes(first: Any, second: Any) -> None:
        for tensor in (first, second):
            if isinstance(tensor, FakeTensor):
                tensor.fake_mode.fake_tensor_converter.tensor_memo.clear()
        kept = {name: value for name, value in first.__dict__.items() if name not in of_fakes}
        swap(first, second)  # type: ignore[no-untyped-call]
        first.__dict__.update(kept)

    torch.utils.swap_tensors = swap_fakes
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap


@cache
def fake_attributes() -> frozenset[str]:
    """Return the attributes that every fake parameter has, as opposed to those that a factory set."""
    with FakeTensorMode():
        return frozenset(nn.Parameter(torch.empty(0)).__dict__)
