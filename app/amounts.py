"""Amounts of Ray's resources, in Ray's own units."""

_UNITS = 10_000
"""Ray counts resources in parts of this size. Floats would find nine times 0.2 in 2.0."""
MIN_AMOUNT, MAX_AMOUNT = 1 / _UNITS, 1e14
"""The smallest amount of a resource that Ray reserves, and the largest that a node may have."""
_COUNTABLE = 1e300
"""Ray's units of more than this would be infinitely many."""


def count_in(held: float, amount: float) -> int:
    """Return how often an amount of a resource fits into what is held, as Ray counts."""
    return _units(held) // max(1, _units(amount))


def suffices(held: float, amount: float) -> bool:
    """Return whether an amount of a resource fits into what is held, as Ray counts."""
    return _units(amount) <= _units(held)


def _units(amount: float) -> int:
    return round(min(amount, _COUNTABLE) * _UNITS)
