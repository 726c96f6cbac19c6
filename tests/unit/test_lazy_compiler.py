"""Functions that are kept out of what is compiled, by a decorator that does not load the compiler."""

import torch
from torch import Tensor

from app.lazy_compiler import keep_uncompiled

is_compiling: list[bool] = []


@keep_uncompiled
def double(values: Tensor) -> Tensor:
    is_compiling.append(torch.compiler.is_compiling())
    return 2 * values


def test_what_is_kept_uncompiled_runs_as_it_is_within_compiled_code() -> None:
    compiled = torch.compile(lambda values: double(values + 1) - 1, backend="eager")
    values = torch.arange(3.0)
    assert torch.equal(compiled(values), 2 * values + 1)
    assert torch.equal(compiled(values), 2 * values + 1)
    assert is_compiling == [False, False], "the compiler would have traced it once, and run what it traced"
