"""Many kills while checkpoints are written; a few of them are in ``tests/integration/test_storage.py``."""

from pathlib import Path

from tests.faults.torn_writes import MOMENTS, require_survival
from tests.launch import Launch
from tests.tables import Faults


def test_fifty_kills_leave_no_bad_checkpoint(launch: Launch, tmp_path: Path, faults: Faults) -> None:
    with faults("T6", "ranks are killed while they write, 50 times", "0 bad checkpoints are read") as fault:
        kills = require_survival(launch, tmp_path, kills=50)
        at_random = [kill for kill in kills if kill.moment not in MOMENTS]
        fault.saw(f"{len(at_random)} kills, {sum(bool(kill.torn) for kill in at_random)} while writing, 0 bad")
        assert sum(bool(kill.torn) for kill in at_random) >= 5, "hardly any was hit while it wrote"
