"""Stopped and gone on with, or not: every plan keeps the same bits."""

from pathlib import Path

from tests.faults.split_runs import ANEW, PLANS, SPLIT_ANEW, SPLITS, STEPS
from tests.helpers import steps_of, write_sums
from tests.launch import Launch, newest_checkpoint, numbers_of, state_of
from tests.tables import Faults


def test_twenty_steps_are_the_same_in_one_go_and_in_parts(launch: Launch, tmp_path: Path, faults: Faults) -> None:
    corpus = write_sums(tmp_path / "corpus")
    for anew in ([], ["7"], [str(STEPS)]):
        runs = launch.torchrun("-m", "tests.faults.split_runs", str(tmp_path), str(corpus), *anew)
        assert runs.ends(600) == 0, runs.output
    for plan in PLANS:
        whole = tmp_path / plan / "20"
        state = state_of(newest_checkpoint(whole))
        assert any(name.endswith("exp_avg_sq") for name in state)
        splits = {*SPLITS, SPLIT_ANEW} if plan in ANEW else {*SPLITS}
        for split in splits - {"20"}:
            with faults("T13", f"torchrun: {plan}, {split} steps", "0 of all tensors differ from 20 steps'") as fault:
                found = state_of(newest_checkpoint(tmp_path / plan / split))
                differing = [name for name in state.keys() | found.keys() if state.get(name) != found.get(name)]
                fault.saw(f"{len(differing)} of {len(state)} differ")
                assert not differing
                assert numbers_of(tmp_path / plan / split) == numbers_of(whole)
                assert [record["step"] for record in steps_of(whole)] == list(range(1, STEPS + 1))
