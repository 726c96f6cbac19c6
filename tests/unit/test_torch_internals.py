"""Functions that are excluded from compilation without loading the compiler."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils import flop_counter

from app.torch_internals import defer_compiler, keep_uncompiled

DECORATED = [
    *((Optimizer, name) for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad")),
    *((optimizer, "step") for optimizer in (Adam, SGD)),
]
is_compiling: list[bool] = []


@keep_uncompiled
def double(values: Tensor) -> Tensor:
    is_compiling.append(torch.compiler.is_compiling())
    return 2 * values


def test_an_excluded_function_runs_uncompiled_within_compiled_code() -> None:
    compiled = torch.compile(lambda values: double(values + 1) - 1, backend="eager")
    values = torch.arange(3.0)
    assert torch.equal(compiled(values), 2 * values + 1)
    assert torch.equal(compiled(values), 2 * values + 1)
    assert is_compiling == [False, False], "the compiler traced the function"


def test_an_excluded_module_keeps_its_parameters() -> None:
    linear = nn.Linear(2, 2)
    excluded: Any = keep_uncompiled(linear)
    assert [*excluded.parameters()] == [*linear.parameters()]


def test_functions_that_torch_lacks_or_does_not_decorate_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def undecorated() -> None: ...

    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.setattr(torch.compiler, "disable", torch.compiler.disable)  # put back what is set below
    for owner, name in DECORATED:
        monkeypatch.setattr(owner, name, undecorated)
    monkeypatch.delattr(flop_counter, "_FlopCounterMode")
    monkeypatch.delattr(torch, "_disable_dynamo")
    defer_compiler.__wrapped__()
    assert all(getattr(owner, name) is undecorated for owner, name in DECORATED)
    assert not hasattr(torch, "_disable_dynamo")
