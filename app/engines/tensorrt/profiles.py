"""The optimisation profiles of a plan: ranges of shapes, each with kernels of its own."""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise, product

from app.engines.base import ShapeProfile

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OptimizationProfile:
    """Every number of rows from ``fewest`` to ``rows``, and every length from ``shortest`` to ``longest``.

    The largest of each is best: that is what a lane pads up to. Triton pads nothing, and is to find a profile all the
    same.
    """

    fewest: int
    rows: int
    shortest: int = 1
    longest: int = 1

    def bounds(self, shape: Shape) -> tuple[Shape, Shape, Shape]:
        """The smallest, best and largest form of a tensor's shape, in which -1 varies."""
        longest = resolved(shape, self.rows, self.longest)
        return resolved(shape, self.fewest, self.shortest), longest, longest


def optimization_profiles(profile: ShapeProfile) -> tuple[OptimizationProfile, ...]:
    """One for each range of rows and of lengths: every size up to the largest is in one."""
    rows, lengths = (pairwise((0, *sizes)) for sizes in (profile.batch_sizes, profile.lengths or (1,)))
    return tuple(
        OptimizationProfile(fewer + 1, most, shorter + 1, longest)
        for (fewer, most), (shorter, longest) in product(rows, lengths)
    )


def index_of(profile: ShapeProfile, rows: int, length: int) -> int:
    """Which of the optimisation profiles takes ``rows``, padded, of ``length``; both are in range."""
    lengths = profile.lengths or (1,)
    return bisect_left(profile.batch_sizes, rows) * len(lengths) + bisect_left(lengths, length)


def resolved(shape: Shape, rows: int, length: int) -> Shape:
    """``shape`` with its sizes of -1 filled in: the first axis counts rows, each other is a length."""
    sizes = (rows, *[length] * (len(shape) - 1))
    return tuple(given if size == -1 else size for size, given in zip(shape, sizes, strict=True))
