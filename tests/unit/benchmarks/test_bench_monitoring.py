"""What the benchmark of monitoring makes of the marks of a replica and a worker."""

from pathlib import Path

import pytest

from benchmarks.monitoring.__main__ import costs_of, report
from benchmarks.monitoring.switched import FOLDER, TURN_S, State, Turns

COST_S = {State.ON: 1.02e-4, State.OFF: 1e-4, State.TRACED: 1.1e-4}
"""CPU seconds of a request in each state."""


def write_marks(name: str, *states: State, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be idle for a turn, work in all states, and be idle again."""
    now_s, cpu_s = 0.0, 0.0
    turns = Turns(name, *states, clock=lambda: now_s)
    monkeypatch.setattr("time.process_time", lambda: cpu_s)
    busy, done = range(1, 1 + rounds * len(states) + 2), 0
    for turn in range(busy.stop + 2):
        for _ in range(4):
            state = turns.mark(done)
            if turn in busy:
                done, cpu_s = done + 1000, cpu_s + 1000 * COST_S[state]
            now_s += TURN_S / 4


def test_only_turns_under_load_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    write_marks("replica", *State, rounds=2, monkeypatch=monkeypatch)
    write_marks("worker", State.ON, State.OFF, rounds=3, monkeypatch=monkeypatch)
    costs = costs_of(tmp_path, rounds=2)
    assert {key: len(spread.values) for key, spread in costs.items()} == {
        ("replica", State.ON): 2, ("replica", State.OFF): 2, ("replica", State.TRACED): 2,
        ("worker", State.ON): 2, ("worker", State.OFF): 2,
    }  # fmt: skip
    for (_, state), spread in costs.items():
        assert spread.values == pytest.approx([COST_S[state]] * 2)
    page = report(costs, watchers=0.012)
    assert "| metrics, CPU of a request | ≤ 2% | +2.0% | reached |" in page
    assert "| traces of 1 % of the requests, CPU of a request | ≤ 3% | +7.8% | **missed** |" in page
    assert "1.2% of one core" in page
