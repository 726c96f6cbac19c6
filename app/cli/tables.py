"""Tables for a terminal, and JSON."""

from collections.abc import Iterator, Sequence

from pydantic_core import to_json


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a line for each row, with columns of equal width. Characters that control a terminal are escaped."""
    shown = [[_shown(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _shown(cell: str) -> str:
    # Names may come from others, such as the ids of their jobs.
    return cell if cell.isprintable() else repr(cell)[1:-1]


def print_json(value: object) -> None:
    """Print a value as JSON. NaN and infinite numbers, which JSON does not know, are null."""
    print(to_json(value, inf_nan_mode="null", fallback=str).decode())
