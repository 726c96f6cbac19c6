"""Tables for a terminal, and JSON."""

import json
from collections.abc import Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a line for each row, with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def print_json(value: object) -> None:
    """Print a value of plain types. Other types, such as paths and times, are written as texts."""
    print(json.dumps(value, ensure_ascii=False, default=str))
