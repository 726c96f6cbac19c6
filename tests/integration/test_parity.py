"""Every plan trains the model that one process of plain PyTorch trains, and goes on from any other plan's state."""

import json
import math
from dataclasses import dataclass

import pytest

from tests.helpers import run
from tests.parity.plans import GOES_ON, HALF, KEPT, PLANS, STEPS, rows_of
from tests.tables import Tables

Losses = dict[str, dict[str, list[float]]]
"""By row, then by whose they are."""


def difference(losses: list[float], expected: list[float]) -> float:
    """The largest relative difference; infinite where a loss is not a number."""
    if not all(map(math.isfinite, losses)):
        return math.inf
    return max(abs(loss - other) / other for loss, other in zip(losses, expected, strict=True))


@dataclass(frozen=True)
class Trained:
    """What every row of the table came to, by the number of processes."""

    compared: dict[int, Losses]
    went_on: dict[int, Losses]
    """From each state that was kept after half of the steps."""

    def second_half(self) -> dict[str, list[float]]:
        """The losses that each kept state went on to, by its folder's name."""
        rows = {processes: rows_of(processes) for processes in PLANS}
        return {
            rows[processes][name].slug: each["plan"][HALF:STEPS]
            for processes, found in self.compared.items()
            for name, each in found.items()
            if rows[processes][name].is_kept
        }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    done = run(
        *("python", "-m", "tests.parity.worker", str(tmp_path_factory.mktemp("states"))),
        environment={"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        timeout=900,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOSSES ")]
    assert lines, done.stdout + done.stderr
    found = json.loads(lines[0].removeprefix("LOSSES "))
    compared, went_on = (
        {int(number): losses for number, losses in found[what].items()} for what in ("compare", "go on")
    )
    return Trained(compared, went_on)


@pytest.mark.parametrize("processes", PLANS)
def test_every_plan_trains_the_same_model(processes: int, trained: Trained, tables: Tables) -> None:
    found, rows = trained.compared[processes], rows_of(processes)
    apart = {name: difference(losses["plan"], losses["plain"]) for name, losses in found.items()}
    tables.add(
        f"losses of {STEPS} steps against one process of plain PyTorch, {processes} processes",
        ("plan", "largest relative difference", "allowed"),
        [(name, f"{apart[name]:.1e}", f"{rows[name].tolerance:.0e}") for name in apart],
    )
    assert apart.keys() == rows.keys()
    for name, losses in found.items():
        assert losses["plain"][-1] < 0.9 * losses["plain"][0], "nothing was learned, so nothing was compared"
        assert apart[name] <= rows[name].tolerance, name


def test_a_run_goes_on_under_any_plan_on_any_number_of_processes(trained: Trained, tables: Tables) -> None:
    expected, table = trained.second_half(), []
    assert len(expected) == len(KEPT)
    for processes, wanted in GOES_ON.items():
        assert trained.went_on[processes].keys() == set(wanted)
        for name, found in trained.went_on[processes].items():
            for slug, losses in found.items():
                apart = difference(losses, expected[slug])
                table.append((slug.replace("_", " "), name, f"{apart:.1e}"))
                if slug == rows_of(processes)[name].slug:
                    assert losses == expected[slug], f"{name} on {name} is not the same to the bit"
                assert apart <= (1e-3 if "bf16" in slug else 1e-6), f"{slug} -> {name}"
    tables.add(
        f"losses of {STEPS - HALF} steps after going on under another plan",
        ("state of", "goes on as", "difference"),
        table,
    )
