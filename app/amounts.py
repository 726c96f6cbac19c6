"""Amounts of Ray's resources, in Ray's own units."""

_UNITS = 10_000
"""Ray counts resources in parts of this size. Floats would find nine times 0.2 in 2.0."""


def count_in(held: float, amount: float) -> int:
    """Return how often an amount of a resource fits into what is held, as Ray counts."""
    return round(held * _UNITS) // max(1, round(amount * _UNITS))


def suffices(held: float, amount: float) -> bool:
    """Return whether an amount of a resource fits into what is held, as Ray counts."""
    return round(amount * _UNITS) <= round(held * _UNITS)
