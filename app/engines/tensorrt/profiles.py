"""The optimisation profiles of a plan: ranges of shapes, each with kernels of its own."""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise, product

from app.engines.shapes import ShapeProfile

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OptimizationProfile:
    """A number of rows, and every length from ``shortest`` to ``longest``, which is best."""

    rows: int
    shortest: int = 1
    longest: int = 1

    def bounds(self, shape: Shape) -> tuple[Shape, Shape, Shape]:
        """The smallest, best and largest form of a tensor's shape, in which -1 varies."""
        longest = resolved(shape, self.rows, self.longest)
        return resolved(shape, self.rows, self.shortest), longest, longest


def optimization_profiles(profile: ShapeProfile) -> tuple[OptimizationProfile, ...]:
    """One for each number of rows and range of lengths."""
    ranges = pairwise((0, *(profile.lengths or (1,))))
    return tuple(OptimizationProfile(rows, low + 1, high) for rows, (low, high) in product(profile.batch_sizes, ranges))


def index_of(profile: ShapeProfile, rows: int, length: int) -> int:
    """Which of the optimisation profiles takes ``rows``, padded, of ``length``; both are in range."""
    lengths = profile.lengths or (1,)
    return bisect_left(profile.batch_sizes, rows) * len(lengths) + bisect_left(lengths, length)


def resolved(shape: Shape, rows: int, length: int) -> Shape:
    """``shape`` with its sizes of -1 filled in: the first axis counts rows, each other is a length."""
    sizes = (rows, *[length] * (len(shape) - 1))
    return tuple(given if size == -1 else size for size, given in zip(shape, sizes, strict=True))
