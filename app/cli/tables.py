"""Tables for a terminal, and JSON."""

from collections.abc import Iterator, Sequence

from pydantic_core import to_json


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a line for each row, with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def print_json(value: object) -> None:
    """Print a value as JSON. NaN and infinite numbers, which JSON does not know, are null."""
    print(to_json(value, inf_nan_mode="null", fallback=str).decode())
