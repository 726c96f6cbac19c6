"""torch's private parts that training and telemetry use: each in one function, with the reason for its use.

The second half keeps torch's compiler from being imported by runs that do not compile. A small run would spend a third
of its start on importing ``torch._dynamo``. torch's optimizers and DeepSpeed import it to exclude their functions from
compilation, even in runs that compile nothing. No function needs to be excluded before the compiler is loaded. So
``defer_compiler`` replaces functions of torch and DeepSpeed. Functions that a later version lacks or no longer
decorates are left alone. Once anything has loaded the compiler, the replaced functions of torch behave as before. Those
of DeepSpeed's Muon, which recipes cannot choose, stay uncompiled.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial, wraps
from io import IOBase
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Adam, Optimizer
from torch.utils import flop_counter

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]
    from torch.export import ExportedProgram

TensorType = TypeVar("TensorType", bound=Tensor)

_COMPILER = "torch._dynamo"
_Function = Callable[..., Any]

BatchNorm = _BatchNorm
"""The base class of every batch norm. torch has no public one."""


def is_profiling() -> bool:
    """Return whether a profiler records. There is no public way to ask that takes less than 1 µs."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def default_store() -> "Store":
    """Return the default group's store, in which the watchdog exchanges beats. No public name returns it."""
    return distributed_c10d._get_default_store()


def set_default_group_timeout(timeout: timedelta) -> None:
    """Set the timeout of process groups that are created from now on.

    DeepSpeed creates groups without passing a timeout, so they take these module variables.
    """
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, name, timeout)


def load_pt2(path: Path) -> "ExportedProgram":
    """Read a program of ``torch.export.save``, without the fallback of ``torch.export.load`` to pickle formats."""
    from torch.export.pt2_archive import _package

    return _package.load_pt2(str(path)).exported_programs["model"]


def is_symbolic_function(name: str) -> bool:
    """Return whether ``name`` is an expression class of sympy or torch. torch has no public list of its classes."""
    import sympy
    from torch.utils._sympy import functions

    found = getattr(functions, name, getattr(sympy, name, None))
    return isinstance(found, type) and issubclass(found, sympy.Basic)


def is_persistent_buffer(module: nn.Module, name: str) -> bool:
    """Return whether a buffer of ``module`` is in its state dict.

    Only ``state_dict()`` would tell it publicly, but under ZeRO 3 its hooks gather all parameters.
    """
    return name not in module._non_persistent_buffers_set


def extension_folder(name: str) -> Path:
    """Return the folder in which torch compiles the C++ extension ``name``, where a killed build leaves its lock."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, verbose=False))


def make_shell(cls: type[TensorType], shape: tuple[int, ...]) -> TensorType:
    """Return a float32 tensor of class ``cls`` with this shape and no memory.

    ``torch.distributed.checkpoint`` documents its protocol for tensors in parts only for subclasses made this way.
    """
    made: TensorType = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)
    return made


def view_of_file(file: IO[bytes], offset: int, length: int) -> IO[bytes]:
    """Return bytes ``offset`` to ``offset + length`` of ``file`` as a file, as torch's own checkpoint reader does."""
    from torch.distributed.checkpoint.utils import _create_file_view

    return cast(IO[bytes], _create_file_view(cast(IOBase, file), offset, length))


def narrow(whole: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return the rectangle of ``whole`` at ``offsets``, as torch's own checkpoint reader cuts it."""
    from torch.distributed._shard._utils import narrow_tensor_by_index

    return narrow_tensor_by_index(whole, offsets, lengths)


def offset_in_file(meta_tensor: Any) -> int:
    """Return where the values begin in the file from which ``meta_tensor`` was loaded with ``map_location="meta"``.

    It allows reading a part of a large tensor. The public loader reads whole tensors only.
    """
    offset: int | None = meta_tensor.untyped_storage()._checkpoint_offset
    assert offset is not None
    return offset


@cache
def defer_compiler() -> None:
    """Keep torch's own functions, and those of a DeepSpeed that is imported later, from loading the compiler."""
    if _COMPILER in sys.modules:
        return
    for owner, name in (
        *((Optimizer, name) for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad")),
        (getattr(flop_counter, "_FlopCounterMode", None), "__torch_dispatch__"),
    ):
        protected: Any = getattr(owner, name, None)
        if plain := getattr(protected, "__wrapped__", None):
            setattr(owner, name, _until_loaded(plain, protected))
    for optimizer in (Adam, SGD):
        if plain := getattr(optimizer.step, "__wrapped__", None):
            optimizer.step = _until_loaded(_without_graph_breaks(plain), optimizer.step)  # type: ignore[method-assign]
    # On import, DeepSpeed decorates its functions with the first. It decorates the hooks of ZeRO 3 with the second.
    for owner, name in ((torch, "_disable_dynamo"), (torch.compiler, "disable")):
        if disable := getattr(owner, name, None):
            setattr(owner, name, partial(_disabled, disable))


def define_muon_uncompiled() -> None:
    """Make DeepSpeed define Muon as it does for a torch without a compiler. Otherwise it would load the compiler.

    Recipes cannot choose Muon, but DeepSpeed's engines import it to check the type of an optimizer.
    """
    with suppress(ImportError):
        from deepspeed.runtime import compiler

        compiler.compile = lambda *_, **__: compiler.dummy_decorator


def keep_uncompiled(function: _Function) -> _Function:
    """Exclude ``function`` from compilation, without loading the compiler."""
    return _disabled(torch.compiler.disable, function)


def _disabled(disable: _Function, fn: _Function | None = None, recursive: bool = True, **options: Any) -> _Function:
    """Apply torch's decorator ``disable`` to ``fn``, but only once the compiler is loaded."""
    if fn is None:
        return partial(_disabled, disable, recursive=recursive, **options)
    if not inspect.isfunction(fn):  # torch also takes modules and classes
        return disable(fn, recursive, **options)  # type: ignore[no-any-return]
    protected = cache(partial(disable, fn, recursive, **options))
    return _until_loaded(fn, lambda *args, **kwargs: protected()(*args, **kwargs))


def _until_loaded(plain: _Function, protected: _Function) -> _Function:
    """Return a function that calls ``plain`` until the compiler is loaded, and ``protected`` from then on."""

    @wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (protected if _COMPILER in sys.modules else plain)(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined] # the compiler does not trace it
    return call


def _without_graph_breaks(step: _Function) -> _Function:
    """Wrap an optimizer's undecorated ``step`` as torch does, but without the graph breaks for the compiler."""

    @wraps(step)
    def run(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return run
