"""Deferred initialization: a model on the meta device, with the recorded operations that initialize its tensors.

The factory runs once on fake tensors, and every operation on them is recorded. ``make`` replays the operations in the
same order, so random values are drawn as if the whole model had been built. It holds little more than one tensor at a
time: a storage is handed over after its last operation, and freed if the next operation overwrites it.
(After torchdistX's deferred initialization: https://pytorch.org/torchdistx/latest/deferred_init.html)
"""

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_iter, tree_map_only

from app.models.recording import (
    Operation,
    Recording,
    UnrecordableError,
    Window,
    fake_attributes,
    silent_fakes,
    swappable_fakes,
)
from app.process_state import return_freed_memory
from app.storage import no_op

Finish = Callable[[Tensor], Tensor]
Place = Callable[[nn.Parameter], None]

_TRIM_BYTES = 2**26
"""Bytes initialized between two calls of ``return_freed_memory``."""


@dataclass(frozen=True)
class Blueprint:
    """A model on the meta device, until ``make``. Tensors that were computed immediately are real already."""

    model: nn.Module
    _windows: dict[int, Window] = field(default_factory=dict, repr=False)
    """Windows by the ``id`` of a parameter or buffer."""
    _operations: list[Operation] = field(default_factory=list, repr=False)
    _storages: dict[int, UntypedStorage] = field(default_factory=dict, repr=False)
    _given: Mapping[int, Callable[[], Tensor]] = field(default_factory=dict, repr=False)
    """Readers of the tensors that are not initialized, by the ``id`` of a parameter or buffer."""

    @classmethod
    def of(cls, build: Callable[[], nn.Module]) -> "Blueprint":
        """Record ``build``. If it cannot be deferred, for example because it reads a weight, build the model now.

        torch's random numbers are drawn in ``make``. Raises what ``build`` raises.
        """
        before, recording = random_states(), Recording()
        try:
            with silent_fakes(), swappable_fakes(), FakeTensorMode(allow_non_fake_inputs=True), recording:
                model = build()
            windows = _to_meta(model, recording)
            # ``make`` would draw these numbers again, and in another order.
            if not torch.equal(before[0], torch.get_rng_state()):
                raise UnrecordableError("random numbers were drawn at once")
        except Exception:
            # The second call raises an error of the factory itself again.
            restore_random_states(*before)
            return cls(build())
        return cls(model, windows, recording.operations, recording.storages)

    @property
    def num_parameters(self) -> int:
        """The number of values in the parameters, before ``make``. A shared parameter counts once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def num_trained(self) -> int:
        """The number of values that training changes."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def with_values(self, readers: Mapping[str, Callable[[], Tensor]]) -> "Blueprint":
        """Return the blueprint with readers of some tensors, by name, which ``make`` calls to get their values.

        Only one value is in memory at a time, and each process reads only the tensors that it makes.
        """
        state = self.model.state_dict(keep_vars=True)
        return replace(self, _given={id(state[name]): read for name, read in readers.items()})

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
        self._read(places, finish, place)
        fresh = places.keys() - self._given.keys()
        # Parameters without a window were computed immediately, so they are real already.
        for key, (tensor, _) in places.items():
            if key in fresh and isinstance(tensor, nn.Parameter) and key not in self._windows:
                _put(tensor, finish(tensor.detach()), places, place)
        # Without given values every operation is needed, and none has to be searched for.
        self._initialize(fresh, places, self._operations_for(fresh) if self._given else self._operations, finish, place)
        return self.model

    def load(self, values: Mapping[str, Tensor]) -> nn.Module:
        """Give the model the tensors of a state dict, and return it.

        A tensor of the right dtype and memory layout is not copied. Non-persistent buffers, such as tables of rotary
        positions, are initialized, because a state dict does not contain them.

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
        self._initialize(others, places, self._operations_for(others))
        return self.model

    def _read(self, places: "_Places", finish: Finish, place: Place) -> None:
        """Give the tensors that have readers their values, in the model's order."""
        since_trim = 0
        for key, (tensor, _) in places.items():
            if key not in self._given:
                continue
            value = _like(tensor, self._given[key]())
            since_trim += value.nbytes
            _put(tensor, finish(value) if isinstance(tensor, nn.Parameter) else value, places, place)
            del value
            if since_trim > _TRIM_BYTES:
                return_freed_memory()
                since_trim = 0

    def _operations_for(self, tensors: Collection[int]) -> "list[Operation]":
        """Return, in order, the operations that can affect the final content of ``tensors``, listed by ``id``."""
        storages = {self._windows[key].storage for key in tensors if key in self._windows}
        return _operations_for(storages, self._operations)

    def _initialize(
        self,
        tensors: Collection[int],
        places: "_Places",
        operations: "list[Operation]",
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
            # Otherwise they would stay in memory while the next tensor is made.
            del storage, value
            if since_trim > _TRIM_BYTES:
                return_freed_memory()
                since_trim = 0

    @torch.no_grad()
    def _replay(self, wanted: Collection[int], operations: list[Operation]) -> Iterator[tuple[int, UntypedStorage]]:
        """Yield each wanted storage after its last operation.

        The order is the same in every process: ZeRO 3 partitions parameters collectively as they come.
        """
        uses = _uses(operations)
        live: dict[int, UntypedStorage] = {}
        # No operation touches these: the factory leaves them uninitialized, as ``torch.empty`` does.
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

    def _run(self, operation: Operation, live: dict[int, UntypedStorage]) -> None:
        def real(window: Window) -> Tensor:
            if window.storage not in live:
                live[window.storage] = _storage(self._storages[window.storage].nbytes())
            return window.over(live[window.storage])

        arguments, options = tree_map_only(Window, real, (operation.arguments, operation.options))
        made = operation.function(*arguments, **options)
        for window, tensor in zip(operation.results, made if isinstance(made, list | tuple) else (made,), strict=True):
            if window is not None:
                live[window.storage] = tensor.untyped_storage()


def _storage(nbytes: int) -> UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()


def _uses(operations: list[Operation]) -> dict[int, list[int]]:
    """Return the numbers of the operations that touch each storage."""
    uses: dict[int, list[int]] = {}
    for number, operation in enumerate(operations):
        for key in operation.touches():
            uses.setdefault(key, []).append(number)
    return uses


def _operations_for(storages: set[int], operations: list[Operation]) -> list[Operation]:
    """Return, in order, the ``operations`` that can affect the final content of ``storages``."""
    found: list[Operation] = []
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


def _to_meta(model: nn.Module, recording: Recording) -> dict[int, Window]:
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
            raise UnrecordableError(f"{type(module).__name__} has a tensor that is neither parameter nor buffer")
    return windows


def _put(old: Tensor, value: Tensor, places: _Places, place: Place = no_op) -> Tensor:
    """Replace ``old`` in the model by ``value``, as a parameter if ``old`` is one."""
    if not isinstance(old, nn.Parameter):
        for module, name in places[id(old)][1]:
            module._buffers[name] = value
        return value
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    # A factory may have set attributes of its own on the parameter.
    new.__dict__.update({name: value for name, value in old.__dict__.items() if name not in fake_attributes()})
    for module, name in places[id(old)][1]:
        setattr(module, name, new)
    place(new)
    return new


def random_states() -> tuple[Tensor, Any, Any]:
    """Return the states of the random generators of torch, Python and NumPy."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def restore_random_states(of_torch: Tensor, of_python: Any, of_numpy: Any) -> None:
    """Restore the states that ``random_states`` returned."""
    torch.set_rng_state(of_torch)
    random.setstate(of_python)
    np.random.set_state(of_numpy)
