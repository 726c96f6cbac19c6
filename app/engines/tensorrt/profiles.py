"""The sizes that a plan is built for."""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise, product

from app.errors import CompileError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Profile:
    """An optimisation profile: a number of rows, and every length from ``shortest`` to ``longest``, which is best."""

    rows: int
    shortest: int = 1
    longest: int = 1

    def bounds(self, shape: Shape) -> tuple[Shape, Shape, Shape]:
        """The smallest, best and largest form of a tensor's shape, in which -1 varies."""
        longest = resolved(shape, self.rows, self.longest)
        return resolved(shape, self.rows, self.shortest), longest, longest


@dataclass(frozen=True)
class Buckets:
    """Numbers of rows that batches are padded up to, and lengths that are fast where there is a length.

    Raises:
        CompileError: no number of rows, or numbers that do not ascend from 1 or more.
    """

    batches: tuple[int, ...]
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for sizes in (self.batches, self.lengths):
            if any(smaller >= larger for smaller, larger in pairwise((0, *sizes))):
                raise CompileError(f"the sizes {list(sizes)} do not ascend from 1 or more")
        if not self.batches:
            raise CompileError("a plan is built for one number of rows at least, and none is given")

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """One for each number of rows and range of lengths."""
        lengths = self.lengths or (1,)
        ranges = pairwise((0, *lengths))
        return tuple(Profile(rows, low + 1, high) for rows, (low, high) in product(self.batches, ranges))

    def profile_of(self, rows: int, length: int) -> int:
        """The index of the profile that takes ``rows``, padded, of ``length``; both are in range."""
        lengths = self.lengths or (1,)
        return bisect_left(self.batches, rows) * len(lengths) + bisect_left(lengths, length)


def resolved(shape: Shape, rows: int, length: int) -> Shape:
    """``shape`` with its sizes of -1 filled in: the first axis counts rows, each other is a length."""
    sizes = (rows, *[length] * (len(shape) - 1))
    return tuple(given if size == -1 else size for size, given in zip(shape, sizes, strict=True))
