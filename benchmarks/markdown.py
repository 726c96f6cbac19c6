"""What every RESULTS.md is made of."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """One row of the first table."""

    what: str
    goal: str
    reached: str
    verdict: str


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def goals_table(goals: Sequence[Goal]) -> str:
    """Goals as the first table of a page."""
    rows = [(goal.what, goal.goal, goal.reached, goal.verdict) for goal in goals]
    return table(["what", "goal", "reached", ""], rows)


def verdict(holds: bool) -> str:
    """Beside a goal."""
    return "reached" if holds else "**missed**"


def one_line(reason: str) -> str:
    """The first line of a reason, and the last one of a log that may follow; fit for a table."""
    first, *others = reason.strip().splitlines()
    return (f"{first} … {others[-1]}" if others else first).replace("|", "\\|")
