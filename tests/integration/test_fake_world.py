"""The planner's formulas against our own engine, run as one rank of a world of up to 1,024."""

import re

from tests.helpers import in_fork

_ROW = re.compile(r"\| (?P<rank>.*, rank \d+) \| (?P<sent>.*) \| (?P<states>[+-].*)% \|")


def test_a_rank_of_any_world_sends_and_holds_what_the_planner_says() -> None:
    done = in_fork("benchmarks.planning.fake_check", "--quick", timeout=280)
    rows = [row for line in done.stdout.splitlines() if (row := _ROW.fullmatch(line))]
    assert len(rows) == 4, done.stdout + done.stderr
    for row in rows:
        assert re.fullmatch(r"equal: [\d,]{6,}", row["sent"]), row[0]
        assert abs(float(row["states"])) <= 1.0, row[0]
    assert done.returncode == 0, done.stderr
