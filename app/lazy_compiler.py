"""torch's compiler, imported only by runs that compile.

A small run spends a third of its start on importing ``torch._dynamo``. torch's optimizers and DeepSpeed import it to
exclude their functions from compilation, even in runs that compile nothing. No function needs to be excluded before the
compiler is loaded. Only this module replaces private functions of torch and DeepSpeed for that purpose. Once anything
has loaded the compiler, the replaced functions behave as before.
"""

import sys
from collections.abc import Callable
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
        (flop_counter._FlopCounterMode, "__torch_dispatch__"),
    ):
        protected = getattr(owner, name)
        setattr(owner, name, _until_loaded(protected.__wrapped__, protected))
    for optimizer in (Adam, SGD):
        optimizer.step = _until_loaded(_without_graph_breaks(optimizer.step), optimizer.step)  # type: ignore[method-assign]
    # On import, DeepSpeed decorates its functions with the first. It decorates the hooks of ZeRO 3 with the second.
    torch._disable_dynamo = partial(_disabled, torch._disable_dynamo)  # type: ignore[attr-defined]
    torch.compiler.disable = partial(_disabled, torch.compiler.disable)


def define_muon_uncompiled() -> None:
    """Make DeepSpeed define Muon as it does for a torch without a compiler. Otherwise it would load the compiler.

    Recipes cannot choose Muon, but DeepSpeed's engines import it to check the type of an optimizer.
    """
    from deepspeed.runtime import compiler

    compiler.compile = lambda: compiler.dummy_decorator


def keep_uncompiled(function: _Function) -> _Function:
    """Exclude ``function`` from compilation, without loading the compiler."""
    return _disabled(torch.compiler.disable, function)


def _disabled(disable: _Function, fn: _Function | None = None, recursive: bool = True, **options: Any) -> _Function:
    """Apply torch's decorator ``disable`` to ``fn``, but only once the compiler is loaded."""
    if fn is None:
        return partial(_disabled, disable, recursive=recursive, **options)
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
    """Return an optimizer's ``step`` without the graph breaks that torch adds for the compiler."""
    plain: _Function = step.__wrapped__  # type: ignore[attr-defined]

    @wraps(plain)
    def run(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, *args, **kwargs)

    return run
