"""torch's compiler, imported only by runs that compile.

A small run spends a third of its start on importing ``torch._dynamo``. torch's optimizers and DeepSpeed import it to
exclude their functions from compilation, even in runs that compile nothing. No function needs to be excluded before the
compiler is loaded. So this module replaces functions of torch and DeepSpeed, some of them private. Functions that a
later version lacks or no longer decorates are left alone. Once anything has loaded the compiler, the replaced functions
of torch behave as before. Those of DeepSpeed's Muon, which recipes cannot choose, stay uncompiled.
"""

import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial, wraps
from typing import Any

import torch
from torch.optim import SGD, Adam, Optimizer
from torch.utils import flop_counter

_COMPILER = "torch._dynamo"
_Function = Callable[..., Any]


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
