"""A run that goes on with other numbers of processes sees every sample as often as it should."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.ledger import RECIPE, expected, written_in
from tests.helpers import folder_of, steps_of, wait_until
from tests.launch import EVERY_STEPS, Launch, Launched, newest_step
from tests.tables import Faults

EPOCHS = 3


SHARDS = ["data.shards={size: 40KB, window: 80KB}"]
TOKENS = ["train.global_batch_size=null", "train.tokens_per_batch=8192", "train.linear_baseline=false", "tune=null"]
TEXTS = "recipes/reviews.yaml"


@dataclass(frozen=True)
class Case:
    """A recipe whose model notes its samples."""

    told: str
    keys: Sequence[str] = ()
    recipe: str = RECIPE
    model: str = "tests.faults.models:LedgerCnn"


CASES = [
    Case("", ()),
    Case(", data in shards", SHARDS),
    Case(", batches of tokens", TOKENS, TEXTS, "tests.faults.models:LedgerText"),
    Case(
        ", batches of tokens in shards",
        [*TOKENS, "data.shards={size: 100KB, window: 300KB}"],
        TEXTS,
        "tests.faults.models:LedgerText",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.told.lstrip(", ").replace(" ", "-") or "memory")
def test_two_processes_then_one_then_four(launch: Launch, tmp_path: Path, faults: Faults, case: Case) -> None:
    storage, data = tmp_path / "storage", case.keys

    def start(processes: int, name: str) -> Launched:
        (tmp_path / name).mkdir(exist_ok=True)
        keeping = [f"train.checkpoint.every_steps={EVERY_STEPS}", "train.resume=latest", "train.early_stopping=null"]
        width = ", width: 32" if case.recipe == RECIPE else ""
        ledger = [f"model.factory={case.model}", f"model.args={{folder: {tmp_path / name}, pause_s: 0.05{width}}}"]
        overrides = [*keeping, *ledger, *data, f"name={name}", f"train.epochs={EPOCHS}"]
        return launch.torchrun("-m", "app.training", case.recipe, *overrides, processes=processes)

    told = f"torchrun{case.told}: stopped, on with 2, 1, 4 processes"
    with faults("T12", told, "each sample once an epoch; loss within 1e-6 of 2's") as fault:
        whole = start(2, "whole").result()
        stops = []
        for processes in (2, 1):
            run = start(processes, "parts")
            before = newest_step(storage, "parts")
            wait_until(lambda before=before: newest_step(storage, "parts") > before + EVERY_STEPS, timeout_s=300)
            os.kill(run.ranks()[0], signal.SIGTERM)
            stops.append(run.result()["metrics"]["steps"])
        parts = start(4, "parts").result()
        assert parts["metrics"]["resumed_from_step"] == stops[-1]
        assert written_in(tmp_path / "whole") == expected(EPOCHS, data, case.recipe)
        assert written_in(tmp_path / "parts") == expected(EPOCHS, data, case.recipe)

        steps, reference = steps_of(folder_of(parts)), steps_of(folder_of(whole))
        assert [record["step"] for record in steps] == [record["step"] for record in reference]
        apart = [abs(one["loss"] - other["loss"]) / other["loss"] for one, other in zip(steps, reference, strict=True)]
        fault.saw(f"stopped at {stops}, then {apart[stops[0]]:.0e} apart, at most {max(apart):.0e}; no sample twice")
        assert max(apart[: stops[0]]) == 0.0
        assert apart[stops[0]] <= 1e-6
        assert max(apart) <= 1e-3
