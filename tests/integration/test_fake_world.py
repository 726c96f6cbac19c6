"""The planner's formulas against our own engine, run as one rank of a world of up to 1,024."""

import re

from tests.helpers import in_fork

ROWS = 4


def test_a_rank_of_any_world_sends_and_holds_what_the_planner_says() -> None:
    done = in_fork("benchmarks.planning.fake_check", "--quick", timeout=280)
    rows = [
        line for line in done.stdout.splitlines() if re.search(r"\| rank|---", line) is None and line.startswith("|")
    ]
    assert len(rows) == ROWS, done.stdout + done.stderr
    for row in rows:
        _, name, sent, states, _ = (cell.strip() for cell in row.split("|"))
        assert re.fullmatch(r"equal: [\d,]{6,}", sent), row
        assert abs(float(states.removesuffix("%"))) <= 1.0, row
    assert done.returncode == 0, done.stderr
