"""Every plan trains the model that one process of plain PyTorch trains, and goes on from any other plan's state."""

import json
import math
from dataclasses import dataclass

import pytest

from tests.helpers import in_fork
from tests.parity.plans import HALF, SELECTIONS, STEPS, Selection, rows_of
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
    """Losses of every row, by the number of processes."""

    selected: Selection
    compared: dict[int, Losses]
    went_on: dict[int, Losses]
    """From each state that was kept after half of the steps."""

    def second_half(self) -> dict[str, list[float]]:
        """The losses that each kept state went on to, by its folder's name."""
        return {
            rows_of(processes)[name].slug: losses["plan"][HALF:STEPS]
            for processes, found in self.compared.items()
            for name, losses in found.items()
            if name in self.selected.kept
        }


@pytest.fixture(scope="module", params=["covering", pytest.param("whole", marks=pytest.mark.slow)])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = str(tmp_path_factory.mktemp("states"))
    done = in_fork("tests.parity.worker", folder, request.param, environment={"TORCH_CPP_LOG_LEVEL": "ERROR"})
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOSSES ")]
    assert lines, done.stdout + done.stderr
    found = json.loads(lines[0].removeprefix("LOSSES "))
    compared, went_on = (
        {int(number): losses for number, losses in found[what].items()} for what in ("compare", "go on")
    )
    return Trained(SELECTIONS[request.param], compared, went_on)


def test_every_plan_trains_the_same_model(trained: Trained, tables: Tables) -> None:
    for processes, names in trained.selected.compared.items():
        found, rows = trained.compared[processes], rows_of(processes)
        apart = {name: difference(losses["plan"], losses["plain"]) for name, losses in found.items()}
        tables.add(
            f"losses of {STEPS} steps against one process of plain PyTorch, {processes} processes",
            ("plan", "largest relative difference", "allowed"),
            [(name, f"{apart[name]:.1e}", f"{rows[name].tolerance:.0e}") for name in apart],
        )
        assert apart.keys() == set(names)
        for name, losses in found.items():
            assert losses["plain"][-1] < 0.9 * losses["plain"][0], "nothing was learned, so nothing was compared"
            assert apart[name] <= rows[name].tolerance, name
            # AdamW holds two numbers for each value of an adapter, and none for the frozen weights.
            assert all(1.9 < share < 2.1 for share in losses.get("state", [])), name


def test_a_run_goes_on_under_any_plan_on_any_number_of_processes(trained: Trained, tables: Tables) -> None:
    expected, table = trained.second_half(), []
    assert len(expected) == len(trained.selected.kept)
    for processes, wanted in trained.selected.goes_on.items():
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
