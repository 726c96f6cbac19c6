"""Deferred initialisation: a model on the meta device, with the recorded operations that initialise its tensors.

The factory runs once on fake tensors, and every operation on them is recorded. ``make`` replays the operations in the
same order, so random values are drawn as if the whole model had been built. It holds little more than one tensor at a
time: a storage is handed over after its last operation, and freed if the next operation overwrites it.
(After torchdistX's deferred initialisation: https://pytorch.org/torchdistx/latest/deferred_init.html)
"""

import ctypes
import logging
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from app.storage import no_op

Finish = Callable[[Tensor], Tensor]
Place = Callable[[nn.Parameter], None]

_COMPUTED = frozenset({"arange", "linspace", "logspace", "scalar_tensor"})
"""Operations that run immediately, because factories read their values."""
_TRIM_BYTES = 2**26
"""Bytes initialised between two calls of ``return_freed_memory``."""
_UNINITIALISED = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"})
_OVERWRITES = frozenset(
    {"normal_", "uniform_", "zero_", "fill_", "copy_", "bernoulli_", "exponential_", "log_normal_", "random_"}
)


class _UnrecordableError(Exception):
    """The factory does something that cannot be deferred, such as reading a value."""


@dataclass(frozen=True)
class _Window:
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
class _Operation:
    function: Any
    arguments: tuple[Any, ...]
    """Fake tensors are recorded as windows, real tensors as constants."""
    options: Mapping[str, Any]
    results: tuple[_Window | None, ...]
    """Results with a new storage; None for a view of an argument."""
    overwrites: int | None
    """The storage whose previous content is overwritten completely."""

    def touches(self) -> list[int]:
        """Return the storages it reads or writes, each once, in the order of the arguments and results."""
        given = [leaf for leaf in tree_iter((self.arguments, self.options)) if isinstance(leaf, _Window)]
        return list(dict.fromkeys(window.storage for window in (*given, *self.results) if window is not None))


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the operations of a factory on fake tensors, which report the CPU as device and have no memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self.storages: dict[int, UntypedStorage] = {}
        """Storages of the fake tensors, kept alive so that no identity is reused."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        given = [leaf for leaf in tree_iter((args, options)) if isinstance(leaf, Tensor)]
        name = func.overloadpacket.__name__
        if not any(isinstance(tensor, FakeTensor) for tensor in given) and (given or name in _COMPUTED):
            with unset_fake_temporarily():
                return func(*args, **options)
        if torch.device(options.get("device") or "cpu").type != "cpu":
            raise _UnrecordableError(f"{func} makes a tensor on {options['device']}")
        _refuse_writes_to_constants(func, args)
        recorded = tree_map_only(Tensor, self._window_or_constant, (args, options))
        made = func(*args, **options)
        self._record(func, name, recorded, made)
        return made

    def window(self, tensor: Tensor) -> _Window:
        """Return the view of its storage that ``tensor`` is."""
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = storage
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return _Window(storage._cdata, shape, stride, int(tensor.storage_offset()), tensor.dtype)

    def _record(self, func: Any, name: str, recorded: Any, made: Any) -> None:
        results = tuple(
            self.window(result) if isinstance(result, Tensor) and not self._is_known(result) else None
            for result in (made if isinstance(made, list | tuple) else (made,))
        )
        is_view = not func._schema.is_mutable and all(result is None for result in results)
        if is_view or name in _UNINITIALISED:
            return
        arguments, options = recorded
        target = arguments[0] if arguments and isinstance(arguments[0], _Window) else None
        overwritten = target.storage if target and name in _OVERWRITES and self._covers(target) else None
        self.operations.append(_Operation(func, arguments, options, results, overwritten))

    def _is_known(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.storages

    def _covers(self, window: _Window) -> bool:
        size = torch.Size(window.shape).numel() * window.dtype.itemsize
        return window.offset == 0 and size == self.storages[window.storage].nbytes()

    def _window_or_constant(self, tensor: Tensor) -> "_Window | Tensor":
        if isinstance(tensor, FakeTensor):
            return self.window(tensor)
        with unset_fake_temporarily():
            return tensor.detach().clone()


def _refuse_writes_to_constants(func: Any, args: tuple[Any, ...]) -> None:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            raise _UnrecordableError(f"{func} writes into a tensor that is there already")


@dataclass(frozen=True)
class Blueprint:
    """A model on the meta device, until ``make``. Tensors that were computed immediately are real already."""

    model: nn.Module
    _windows: dict[int, _Window] = field(default_factory=dict, repr=False)
    """Windows by the ``id`` of a parameter or buffer."""
    _operations: list[_Operation] = field(default_factory=list, repr=False)
    _storages: dict[int, UntypedStorage] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, build: Callable[[], nn.Module]) -> "Blueprint":
        """Record ``build``. If it cannot be deferred, for example because it reads a weight, build the model now.

        torch's random numbers are drawn in ``make``. Raises what ``build`` raises.
        """
        before, recording = random_states(), _Recording()
        try:
            with _silent_fakes(), FakeTensorMode(allow_non_fake_inputs=True), recording:
                model = build()
            windows = _to_meta(model, recording)
            if not torch.equal(before[0], torch.get_rng_state()):
                raise _UnrecordableError("random numbers were drawn at once")
        except Exception:  # an error of the factory itself is raised again by the second call
            restore_random_states(*before)
            return cls(build())
        return cls(model, windows, recording.operations, recording.storages)

    @property
    def num_parameters(self) -> int:
        """The number of values in the parameters, before ``make``. A shared parameter counts once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def make(
        self, finish: Finish = lambda tensor: tensor, place: Place = no_op, part: nn.Module | None = None
    ) -> nn.Module:
        """Give the model its tensors, and return it.

        Args:
            finish: converts the value of each parameter on the CPU, for example to a lower precision.
            place: is called with each parameter once it is in the model, for example to partition it.
            part: a module that consists of modules of the model. If given, only these get tensors. The values are those
                of the whole model.
        """
        places = _places_of(part or self.model)
        for tensor, _ in places.values():
            if isinstance(tensor, nn.Parameter) and id(tensor) not in self._windows:
                _put(tensor, finish(tensor.detach()), places, place)
        self._initialise(places.keys(), places, self._operations, finish, place)
        return self.model

    def load(self, values: Mapping[str, Tensor]) -> nn.Module:
        """Give the model the tensors of a state dict, and return it.

        A tensor of the right dtype and memory layout is not copied. Non-persistent buffers, such as tables of rotary
        positions, are initialised, because a state dict does not contain them.

        Args:
            values: tensors by name. A shared tensor may have any of its names, or several.

        Raises:
            ValueError: a tensor is missing or unknown, or has the wrong shape.
        """
        state = {name: item for name, item in self.model.state_dict(keep_vars=True).items() if torch.is_tensor(item)}
        _require_fit(state, values)
        places = _places_of(self.model)
        for name, value in values.items():
            _put(state[name], _like(state[name], value), places)
        others = places.keys() - set(map(id, state.values()))
        storages = {self._windows[key].storage for key in others if key in self._windows}
        self._initialise(others, places, _operations_for(storages, self._operations))
        return self.model

    def _initialise(
        self,
        tensors: Collection[int],
        places: "_Places",
        operations: "list[_Operation]",
        finish: Finish = lambda tensor: tensor,
        place: Place = no_op,
    ) -> None:
        """Replay ``operations``, and give the results to those ``tensors``, listed by ``id``, that were recorded."""
        wanted: dict[int, list[Tensor]] = {}
        for key, (tensor, _) in places.items():
            if key in tensors and key in self._windows:
                wanted.setdefault(self._windows[key].storage, []).append(tensor)
        since_trim = 0
        for key, storage in self._replay(wanted.keys(), operations):
            since_trim += storage.nbytes()
            for tensor in wanted[key]:
                value = self._windows[id(tensor)].over(storage)
                _put(tensor, finish(value) if isinstance(tensor, nn.Parameter) else value, places, place)
            del storage, value
            if since_trim > _TRIM_BYTES:
                return_freed_memory()
                since_trim = 0

    @torch.no_grad()
    def _replay(self, wanted: Collection[int], operations: list[_Operation]) -> Iterator[tuple[int, UntypedStorage]]:
        """Yield each wanted storage after its last operation.

        The order is the same in every process: ZeRO 3 partitions parameters collectively as they come.
        """
        uses = _uses(operations)
        live: dict[int, UntypedStorage] = {}
        for key in (key for key in wanted if key not in uses):
            yield key, _storage(self._storages[key].nbytes())
        for number, operation in enumerate(operations):
            self._run(operation, live)
            for key in operation.touches():
                later = uses[key][uses[key].index(number) + 1 :]
                if not later and key in wanted:
                    yield key, live.pop(key)
                elif not later or operations[later[0]].overwrites == key:
                    live.pop(key, None)

    def _run(self, operation: _Operation, live: dict[int, UntypedStorage]) -> None:
        def real(window: _Window) -> Tensor:
            if window.storage not in live:
                live[window.storage] = _storage(self._storages[window.storage].nbytes())
            return window.over(live[window.storage])

        arguments, options = tree_map_only(_Window, real, (operation.arguments, operation.options))
        made = operation.function(*arguments, **options)
        for window, tensor in zip(operation.results, made if isinstance(made, list | tuple) else (made,), strict=True):
            if window is not None:
                live[window.storage] = tensor.untyped_storage()


def _storage(nbytes: int) -> UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()


def _uses(operations: list[_Operation]) -> dict[int, list[int]]:
    """Return the numbers of the operations that touch each storage."""
    uses: dict[int, list[int]] = {}
    for number, operation in enumerate(operations):
        for key in operation.touches():
            uses.setdefault(key, []).append(number)
    return uses


def _operations_for(storages: set[int], operations: list[_Operation]) -> list[_Operation]:
    """Return, in order, the ``operations`` that can affect the final content of ``storages``."""
    found: list[_Operation] = []
    for operation in reversed(operations):
        if not storages.isdisjoint(touched := operation.touches()):
            storages = storages.union(touched)
            found.append(operation)
    return found[::-1]


def _require_fit(state: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless ``values`` has exactly the tensors of ``state``, in the same shapes."""
    given = {id(state[name]) for name in values if name in state}
    missing = [name for name, tensor in state.items() if id(tensor) not in given]
    unknown = [name for name in values if name not in state]
    if missing or unknown:
        raise ValueError(f"missing tensors: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}")
    for name, value in values.items():
        if value.shape != state[name].shape:
            raise ValueError(f"{name} has shape {list(value.shape)}: expected {list(state[name].shape)}")


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` with the dtype and memory layout of ``tensor``. Copy it only if they differ."""
    if (value.dtype, value.stride()) == (tensor.dtype, tensor.stride()):
        return value
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(value)


_Places = dict[int, tuple[Tensor, list[tuple[nn.Module, str]]]]


def _places_of(model: nn.Module) -> _Places:
    """Return each parameter and buffer by ``id``, with every module attribute that refers to it."""
    places: _Places = {}
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                places.setdefault(id(tensor), (tensor, []))[1].append((module, name))
    return places


def _to_meta(model: nn.Module, recording: _Recording) -> dict[int, _Window]:
    """Replace the model's fake tensors by meta tensors, and return the window of each.

    Fake tensors cannot be used outside their mode.
    """
    windows, places = {}, _places_of(model)
    for fake, _ in places.values():
        if isinstance(fake, FakeTensor):
            window = recording.window(fake)
            new = _put(fake, torch.empty_strided(*window.layout, dtype=fake.dtype, device="meta"), places)
            windows[id(new)] = window
    for module in model.modules():
        if any(isinstance(leaf, FakeTensor) for leaf in tree_iter(dict(module.__dict__))):
            raise _UnrecordableError(f"{type(module).__name__} has a tensor that is neither parameter nor buffer")
    return windows


@cache
def _fake_attributes() -> frozenset[str]:
    """Return the attributes that every fake parameter has, as opposed to those that a factory set."""
    with FakeTensorMode():
        return frozenset(nn.Parameter(torch.empty(0)).__dict__)


def _put(old: Tensor, value: Tensor, places: _Places, place: Place = no_op) -> Tensor:
    """Replace ``old`` in the model by ``value``, as a parameter if ``old`` is one."""
    if not isinstance(old, nn.Parameter):
        for module, name in places[id(old)][1]:
            module._buffers[name] = value
        return value
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    new.__dict__.update({name: value for name, value in old.__dict__.items() if name not in _fake_attributes()})
    for module, name in places[id(old)][1]:
        setattr(module, name, new)
    place(new)
    return new


@contextmanager
def _silent_fakes() -> Iterator[None]:
    """Silence torch's logs of operations that fake tensors refuse: the model is then built without them."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def random_states() -> tuple[Tensor, Any, Any]:
    """Return the states of the random generators of torch, Python and NumPy."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def restore_random_states(of_torch: Tensor, of_python: Any, of_numpy: Any) -> None:
    """Restore the states that ``random_states`` returned."""
    torch.set_rng_state(of_torch)
    random.setstate(of_python)
    np.random.set_state(of_numpy)


def return_freed_memory() -> None:
    """Return the free heap memory of this process to the system. With a C library other than glibc, do nothing.

    glibc keeps freed blocks of up to 32 MB and splits them for small allocations, until no tensor fits into the rest.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
