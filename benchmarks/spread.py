"""Numbers that were measured several times."""

from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Spread:
    """A number that was measured several times."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of the values."""
        return median(self.values)

    def over(self, other: "Spread") -> "Spread":
        """The ratios to ``other``, value by value: what was measured in one round is compared with its like."""
        return Spread(tuple(mine / theirs for mine, theirs in zip(self.values, other.values, strict=True)))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({min(self.values):.3f} to {max(self.values):.3f})"
