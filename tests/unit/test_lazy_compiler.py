"""A decorator that excludes functions from compilation without loading the compiler."""

import torch
from torch import Tensor

from app.lazy_compiler import keep_uncompiled

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
