"""The optimization profiles of a plan: ranges of shapes, each with its own kernels."""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise, product

from app.engines.base import ShapeProfile

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OptimizationProfile:
    """A range of rows and a range of lengths, both inclusive.

    Kernels are tuned for the largest sizes, because a lane pads to them. Triton does not pad, so the ranges must cover
    every size.
    """

    min_rows: int
    max_rows: int
    min_length: int = 1
    max_length: int = 1

    def bounds(self, shape: Shape) -> tuple[Shape, Shape, Shape]:
        """Return the smallest, best and largest shape of a tensor. In ``shape``, -1 marks dynamic sizes."""
        largest = resolved(shape, self.max_rows, self.max_length)
        return resolved(shape, self.min_rows, self.min_length), largest, largest


def optimization_profiles(profile: ShapeProfile) -> tuple[OptimizationProfile, ...]:
    """Return one profile for each range of rows and of lengths. They cover every size up to the largest."""
    rows, lengths = (pairwise((0, *sizes)) for sizes in (profile.batch_sizes, profile.lengths or (1,)))
    return tuple(
        OptimizationProfile(fewer + 1, max_rows, shorter + 1, max_length)
        for (fewer, max_rows), (shorter, max_length) in product(rows, lengths)
    )


def index_of(profile: ShapeProfile, rows: int, length: int) -> int:
    """Return the index of the optimization profile for padded ``rows`` of a ``length``, both in range."""
    lengths = profile.lengths or (1,)
    return bisect_left(profile.batch_sizes, rows) * len(lengths) + bisect_left(lengths, length)


def resolved(shape: Shape, rows: int, length: int) -> Shape:
    """Return ``shape`` without -1: the first axis counts rows, and every other dynamic axis is a length."""
    sizes = (rows, *[length] * (len(shape) - 1))
    return tuple(given if size == -1 else size for size, given in zip(shape, sizes, strict=True))
