"""The sizes that a compiled model is for."""

from itertools import pairwise
from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

from app.errors import CompileError


class ShapeProfile(BaseModel):
    """The sizes that a model was measured at, and that a plan is built for.

    Raises:
        CompileError: no number of rows, or sizes that do not ascend from 1 or more.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch_sizes: tuple[int, ...]
    """Numbers of rows; a plan pads batches up to the next."""

    lengths: tuple[int, ...] = ()
    """Of rows, in tokens; none for inputs of one size."""

    @model_validator(mode="after")
    def _sizes_ascend(self) -> Self:
        if not self.batch_sizes:
            raise CompileError("compile.batch_sizes is empty: give one number of rows at least")
        for key, sizes in (("compile.batch_sizes", self.batch_sizes), ("data.buckets", self.lengths)):
            if any(smaller >= larger for smaller, larger in pairwise((0, *sizes))):
                raise CompileError(f"{key} is {list(sizes)}: expected sizes that ascend from 1 or more")
        return self
