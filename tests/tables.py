"""Tables that are printed after the tests, whether they passed or not."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Record = Callable[[str, object], None]
"""Keeps what a test found out, under a name, until all tests are done: pytest's ``record_property``."""

_TABLE, _FAULT = "table", "fault"


class Tables:
    """Rows of one title come together, whichever test they are from."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def add(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Rows of a table."""
        self._record(_TABLE, (title, head, rows))


class Fault:
    """A row of the table of faults, while its test runs."""

    seen = ""

    def saw(self, what: str) -> None:
        """Note what happened, with its figures."""
        self.seen = "; ".join(filter(None, [self.seen, what]))


class Faults:
    """The table of faults."""

    def __init__(self, record: Record) -> None:
        self._record = record

    @contextmanager
    def __call__(self, row: str, injected: str, expected: str) -> Iterator[Fault]:
        """Around the part of a test that injects the fault."""
        fault = Fault()
        try:
            yield fault
        except BaseException:
            fault.saw("FAILED")
            raise
        finally:
            self._record(_FAULT, (row, injected, expected, fault.seen))


def rendered(recorded: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """The tables of what all tests recorded, the faults last: sorted, each once that was seen in the same way."""
    tables: dict[str, list[Sequence[str]]] = {}
    faults = set()
    for name, value in recorded:
        if name == _TABLE:
            title, head, rows = value
            tables.setdefault(title, [head]).extend(rows)
        elif name == _FAULT:
            faults.add(tuple(value))
    if faults:
        rows = sorted(faults, key=lambda row: (int("".join(filter(str.isdigit, row[0])) or 0), row))
        tables["faults"] = [("row", "injected", "expected", "seen"), *rows]
    for title, lines in tables.items():
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        cut = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        yield "\n".join([title, *map(str.rstrip, cut)])
