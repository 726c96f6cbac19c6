"""Stopped and gone on with, or not: every plan keeps the same bits."""

from pathlib import Path

import pytest

from tests.faults.split_runs import PLANS, SPLITS, STEPS
from tests.helpers import Faults
from tests.launch import Launch, numbers_of, state_of


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Files of sums."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for first in range(30):
        lines = [f"{first} + {second} = {first + second}\n" for second in range(50)]
        (folder / f"{first}.txt").write_text("".join(lines), encoding="utf-8")
    return folder


def test_twenty_steps_are_the_same_in_one_go_and_in_parts(
    launch: Launch, tmp_path: Path, corpus: Path, faults: Faults
) -> None:
    runs = launch.torchrun("-m", "tests.faults.split_runs", str(tmp_path), str(corpus))
    assert runs.ends(600) == 0, runs.output
    last = f"checkpoints/step_{STEPS:08d}"
    for plan in PLANS:
        whole = tmp_path / plan / "20"
        state = state_of(whole / last)
        assert any(name.endswith("exp_avg_sq") for name in state)
        for split in SPLITS.keys() - {"20"}:
            with faults("T13", f"torchrun: {plan}, {split} steps", "0 of all tensors differ from 20 steps'") as fault:
                found = state_of(tmp_path / plan / split / last)
                differing = [name for name in state.keys() | found.keys() if state.get(name) != found.get(name)]
                fault.saw(f"{len(differing)} of {len(state)} differ")
                assert not differing
                assert numbers_of(tmp_path / plan / split) == numbers_of(whole)
                assert [each["step"] for each in numbers_of(whole) if "loss" in each] == list(range(1, STEPS + 1))
